"""Named tensors as bytes, for sending weights and trainer states between processes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import safetensors.torch
from torch import Tensor

from rlflow.execution.wire.row_bytes import Payload


def pack_tensors(tensors: Mapping[str, Tensor]) -> Payload:
    """Pack the tensors into bytes in the safetensors format."""
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return np.frombuffer(safetensors.torch.save(whole), np.uint8)


def unpack_tensors(payload: Payload) -> dict[str, Tensor]:
    """Unpack bytes from ``pack_tensors``. Returns name → tensor."""
    tensors: dict[str, Tensor] = safetensors.torch.load(payload.tobytes())
    return tensors
