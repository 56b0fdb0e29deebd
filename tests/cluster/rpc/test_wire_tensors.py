"""Named tensors as bytes and back, with any dtype and memory layout."""

import numpy as np
import pytest
import torch

from rlflow.cluster.rpc.wire_tensors import pack_tensors, unpack_tensors


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool],
)
def test_every_dtype_comes_back_bit_for_bit(dtype):
    tensors = {
        "a": torch.arange(6).reshape(2, 3).to(dtype),
        "empty": torch.zeros(0, 4, dtype=dtype),
        "one": torch.ones((), dtype=dtype),
    }
    found = unpack_tensors(pack_tensors(tensors))
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name], tensor)


def test_views_and_parameters_are_packed_by_value():
    whole = torch.arange(12.0).reshape(3, 4)
    tensors = {"transposed": whole.t(), "column": whole[:, 1], "parameter": torch.nn.Parameter(whole)}
    found = unpack_tensors(pack_tensors(tensors))
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert not found["parameter"].requires_grad


def test_unpacked_tensors_share_no_memory_with_the_bytes():
    payload = pack_tensors({"a": torch.ones(4)})
    assert payload.dtype == np.uint8
    found = unpack_tensors(payload.copy())
    found["a"].zero_()
    assert unpack_tensors(payload)["a"].tolist() == [1.0] * 4
