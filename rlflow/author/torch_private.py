"""The private parts of PyTorch that rlflow uses. Nothing else in rlflow or its backends names a private part.

`tests/author/test_torch_private.py` fails if a release of PyTorch changes a part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode"]  # a context in which an object sees every operation on tensors

# -- tensors and modules
# ------------------------------------------------------------------------------------------------------------


def lazy_clone(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor whose memory torch copies at the first write."""
    return torch._lazy_clone(tensor)


def storage_address(tensor: Tensor) -> int:
    """Return the address of a tensor's storage, without copying copy-on-write memory."""
    address: int = torch._C._data_address(tensor)  # type: ignore[attr-defined]
    return address


def storage_key(tensor: Tensor) -> int:
    """Return a number that tensors with the same storage share. Works for meta tensors too.

    Valid as long as one of the tensors exists.
    """
    key: int = tensor.untyped_storage()._cdata
    return key


def copy_all(into: Sequence[Tensor], out_of: Sequence[Tensor]) -> None:
    """Copy each source into its destination, converted to the destination's dtype."""
    torch._foreach_copy_(list(into), list(out_of))


def multiply_all(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply each tensor in place."""
    torch._foreach_mul_(list(tensors), factor)


def largest_of_each(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the largest absolute value of each tensor, as 0-d tensors."""
    return torch._foreach_norm(list(tensors), torch.inf)


def replace_parameter(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Put a tensor in the place of a module's parameter.

    ``Module.__setattr__`` accepts only parameters.
    """
    module._parameters[name] = tensor  # type: ignore[assignment]


def change_tensors(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Replace all parameters and buffers of a module by what ``change`` returns for them."""
    module._apply(change)  # type: ignore[no-untyped-call]


# -- ranks
# ------------------------------------------------------------------------------------------------------------


def default_store() -> Any:
    """Return the rendezvous store of torch's default process group."""
    store: Any = dist.distributed_c10d._get_default_store()
    return store


def gloo_options(address: str, timeout: timedelta) -> Any:
    """Return the options of a gloo group whose ranks connect to this address."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices, options._timeout = [gloo.create_device(hostname=address)], timeout
    return options


def own_shard(shape: Sequence[int], mesh: Any, placements: Sequence[Any]) -> tuple[Any, Any]:
    """Return (shape, offset) of this rank's shard of a DTensor."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return compute_local_shape_and_global_offset(shape, mesh, placements)  # type: ignore[arg-type]


# -- attention and compilation
# ------------------------------------------------------------------------------------------------------------


def flash_for_cpu() -> tuple[Any, Any]:
    """Return the forward and the backward operation of flash attention on CPUs, which also give and take the
    logarithms of the softmax sums."""
    operations: Any = torch.ops.aten
    return (
        operations._scaled_dot_product_flash_attention_for_cpu,
        operations._scaled_dot_product_flash_attention_for_cpu_backward,
    )


def missing_compiler(device: str) -> str:
    """Return the reason why torch cannot compile for this type of device (cpu or cuda); "" if it can."""
    if device != "cpu":
        from torch.utils._triton import has_triton

        return "" if has_triton() else "no Triton that works with this device"
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except (exc.InvalidCxxCompiler, OSError) as error:
        return f"no C++ compiler ({type(error).__name__})"
    return ""


def limit_graphs(count: int, in_all: int) -> None:
    """Set the maximum number of graphs of one function, and of all of them, in this process."""
    torch._dynamo.config.recompile_limit = count
    torch._dynamo.config.accumulated_recompile_limit = in_all


def compile_errors() -> tuple[type[Exception], ...]:
    """Return the errors of torch's compilers and of g++."""
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import CppCompileError

    return TorchDynamoException, CppCompileError
