"""Write tensors as safetensors files straight from memory, without a second copy.

The safetensors library's own writer holds the GIL while it copies, which would block the training thread.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


def size(tensors: Mapping[str, Tensor]) -> int:
    """Return the total size of the tensors in bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def shards(tensors: Mapping[str, Tensor], limit: int) -> list[dict[str, Tensor]]:
    """Split tensors, in order, into groups of at most ``limit`` bytes, one group per file.

    A tensor larger than ``limit`` gets a file of its own.
    """
    out: list[dict[str, Tensor]] = [{}]
    for name, tensor in tensors.items():
        if out[-1] and size(out[-1]) + size({name: tensor}) > limit:
            out.append({})
        out[-1][name] = tensor
    return out


def shard_names(stem: str, count: int) -> list[str]:
    """Return ``count`` file names in Hugging Face's style, such as ``STEM-00001-of-00002.safetensors``."""
    return (
        [f"{stem}.safetensors"]
        if count == 1
        else [f"{stem}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    )


def pieces(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file: the header's length, the header, and the data without gaps.

    Tensors with wider elements come first, so that all data is aligned.
    """
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in ordered:
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, tensor in ordered:
        if tensor.numel():
            yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
