"""The private parts of PyTorch that rlflow and its backends use. They are used nowhere else.

`tests/author/test_torch_private.py` fails if a PyTorch release changes one of them.
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
    """Return a copy of a tensor that shares its memory until the first write."""
    return torch._lazy_clone(tensor)


def storage_address(tensor: Tensor) -> int:
    """Return the address of a tensor's storage, without triggering a copy of copy-on-write memory."""
    address: int = torch._C._data_address(tensor)  # type: ignore[attr-defined]
    return address


def storage_key(tensor: Tensor) -> int:
    """Return a number that is the same for all tensors sharing a storage, even for meta tensors.

    It is valid as long as one of these tensors exists.
    """
    key: int = tensor.untyped_storage()._cdata
    return key


def copy_all(into: Sequence[Tensor], out_of: Sequence[Tensor]) -> None:
    """Copy each source to its destination, converting it to the destination's dtype."""
    torch._foreach_copy_(list(into), list(out_of))


def multiply_all(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply each tensor in place."""
    torch._foreach_mul_(list(tensors), factor)


def largest_of_each(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the largest absolute value of each tensor, as 0-d tensors."""
    return torch._foreach_norm(list(tensors), torch.inf)


def replace_parameter(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Replace a module's parameter with a plain tensor, which ``Module.__setattr__`` would reject."""
    module._parameters[name] = tensor  # type: ignore[assignment]


def change_tensors(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Replace each parameter and buffer of a module with what ``change`` returns for it."""
    module._apply(change)  # type: ignore[no-untyped-call]


# -- ranks
# ------------------------------------------------------------------------------------------------------------


def default_store() -> Any:
    """Return the rendezvous store of torch's default process group."""
    store: Any = dist.distributed_c10d._get_default_store()
    return store


def gloo_options(address: str, timeout: timedelta) -> Any:
    """Return options for a gloo group whose ranks connect to this address."""
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
    """Return the forward and backward operations of flash attention on CPUs.

    They also return and take the logarithms of the softmax sums.
    """
    operations: Any = torch.ops.aten
    return (
        operations._scaled_dot_product_flash_attention_for_cpu,
        operations._scaled_dot_product_flash_attention_for_cpu_backward,
    )


def missing_compiler(device: str) -> str:
    """Say why torch can't compile for this type of device (cpu or cuda). Returns "" if it can."""
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
    """Limit how many graphs are compiled in this process, per function and in total."""
    torch._dynamo.config.recompile_limit = count
    torch._dynamo.config.accumulated_recompile_limit = in_all


def compile_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that torch's compilers and g++ can cause."""
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import CppCompileError

    return TorchDynamoException, CppCompileError
