"""The installed PyTorch has the private parts that rlflow uses, and only one file of rlflow names them."""

import pytest
import torch
from private_parts import check_parts, elsewhere
from torch import nn

from rlflow.author import torch_private

FILE = "rlflow/author/torch_private.py"
PARTS = {
    "torch._lazy_clone": None,
    "torch._C._data_address": None,
    "torch.UntypedStorage._cdata": None,
    "torch._foreach_copy_": None,
    "torch._foreach_mul_": None,
    "torch._foreach_norm": None,
    "torch.nn.Module._apply": ("self", "fn"),
    "torch.utils._python_dispatch.TorchDispatchMode": (),
    "torch.distributed.distributed_c10d._get_default_store": (),
    "torch.distributed.tensor._utils.compute_local_shape_and_global_offset": (
        "global_shape",
        "mesh",
        "placements",
    ),
    "torch.distributed.ProcessGroupGloo._Options": None,
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu": None,
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward": None,
    "torch.utils._triton.has_triton": (),
    "torch._inductor.cpp_builder.get_cpp_compiler": (),
    "torch._inductor.exc.InvalidCxxCompiler": None,
    "torch._inductor.exc.CppCompileError": None,
    "torch._dynamo.exc.TorchDynamoException": None,
    "torch._dynamo.config.recompile_limit": None,
    "torch._dynamo.config.accumulated_recompile_limit": None,
}
# the parameters of the operations, which have no Python signature
FLASH = "query key value dropout_p is_causal attn_mask scale"
FLASH_BACKWARD = "grad_out query key value out logsumexp dropout_p is_causal attn_mask scale"


def test_torch_has_the_private_parts():
    check_parts("torch", FILE, PARTS)
    taken = [
        " ".join(each.name for each in operation.default._schema.arguments)
        for operation in torch_private.flash_for_cpu()
    ]
    assert taken == [FLASH, FLASH_BACKWARD], "adapt backends/local/attention.py to the new parameters"


def test_only_one_file_names_private_parts_of_torch():
    assert elsewhere("torch", [FILE, "backends/vllm/internals.py"], PARTS) == []


def test_a_clone_shares_memory_until_the_first_write():
    tensor = torch.arange(4)
    clone = torch_private.lazy_clone(tensor)
    assert torch_private.storage_address(clone) == torch_private.storage_address(tensor)
    clone += 1
    assert tensor.tolist() == [0, 1, 2, 3]
    assert clone.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_views_share_the_key_of_their_storage(device):
    tensor, other = torch.empty(4, device=device), torch.empty(4, device=device)
    keys = [torch_private.storage_key(each) for each in (tensor, tensor[1:], other)]
    assert keys[0] == keys[1] != keys[2]


def test_several_tensors_are_changed_at_once():
    tensors = [torch.tensor([1.0, -3.0]), torch.tensor([2.0])]
    torch_private.multiply_all(tensors, 2.0)
    assert [float(each) for each in torch_private.largest_of_each(tensors)] == [6.0, 4.0]
    into = [torch.zeros(2, dtype=torch.float64), torch.zeros(1)]
    torch_private.copy_all(into, tensors)
    assert [each.tolist() for each in into] == [[2.0, -6.0], [4.0]]


def test_a_module_takes_a_tensor_in_the_place_of_a_parameter():
    layer = nn.Linear(2, 1, bias=False)
    torch_private.replace_parameter(layer, "weight", torch.ones(1, 2))
    assert layer(torch.tensor([2.0, 3.0])).tolist() == [5.0]
    torch_private.change_tensors(nn.Sequential(layer), lambda tensor: tensor.double())
    assert layer.weight.dtype is torch.float64
