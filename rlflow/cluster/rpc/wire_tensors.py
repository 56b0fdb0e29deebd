"""Named tensors as bytes and back, for weights and states of trainers that go between processes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import safetensors.torch
from torch import Tensor

from rlflow.cluster.rpc.parcels import Payload


def pack_tensors(tensors: Mapping[str, Tensor]) -> Payload:
    """The tensors as bytes in the safetensors format."""
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return np.frombuffer(safetensors.torch.save(whole), np.uint8)


def unpack_tensors(payload: Payload) -> dict[str, Tensor]:
    """The tensors of these bytes."""
    tensors: dict[str, Tensor] = safetensors.torch.load(payload.tobytes())
    return tensors
