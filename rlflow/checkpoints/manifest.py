"""The manifest of a checkpoint: its files with their sizes, digests and tensor names, and the run's state.

The manifest starts with a digest of everything after it, so damage to the state is detected too.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rlflow.checkpoints import file_names, plain_state

FORMAT = "rlflow-checkpoint"
VERSION = 1
LARGEST = 256 << 20  # maximum size of a manifest in bytes; a larger file is not read
_HEAD, _MIDDLE, _END = b'{"sha256": "', b'",\n"manifest": ', b"}\n"

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0)]


class FileEntry(BaseModel):
    """The length and the sha256 of a file."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    bytes: Count
    sha256: Digest


class Manifest(BaseModel):
    """A checkpoint's list of files, and the run's state. The manifest is written after all other files."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    format: Literal["rlflow-checkpoint"] = "rlflow-checkpoint"
    version: Literal[1] = 1
    iteration: Count  # number of finished iterations
    files: dict[str, FileEntry]  # name of each file → length and digest
    # group → file → names of its tensors, in the snapshot's order
    groups: dict[str, dict[str, list[str]]]
    state: dict[str, Any]  # plain JSON values

    @model_validator(mode="after")
    def _consistent(self) -> Manifest:
        for name in self.files:
            if not file_names.is_file(name):
                raise ValueError(f"the file name {name!r} is refused: expected {file_names.EXPECTED}")
        shards = [file for files in self.groups.values() for file in files]
        if len(set(shards)) != len(shards) or not set(shards) <= self.files.keys():
            raise ValueError("a group names a file twice, or a file that is not listed")
        return self

    def shards(self) -> dict[str, tuple[str, list[str]]]:
        """Return, for each file with tensors, the name of its group and the names of its tensors."""
        return {
            file: (group, tensors) for group, files in self.groups.items() for file, tensors in files.items()
        }


def encode(manifest: Manifest) -> bytes:
    """Encode a manifest as the content of ``manifest.json``, starting with a digest of the rest."""
    body = plain_state.dumps(manifest.model_dump())
    return _HEAD + hashlib.sha256(body).hexdigest().encode() + _MIDDLE + body + _END


def decode(data: bytes) -> Manifest:
    """Decode a manifest that ``encode`` returned.

    Raises ValueError if the bytes are damaged or have an unknown format or version.
    """
    digest, body = data[len(_HEAD) : len(_HEAD) + 64], data[len(_HEAD) + 64 + len(_MIDDLE) : -len(_END)]
    if data != _HEAD + digest + _MIDDLE + body + _END or hashlib.sha256(body).hexdigest().encode() != digest:
        raise ValueError("it is damaged: its own digest differs")
    content = plain_state.loads(body)
    kind = (content.get("format"), content.get("version")) if isinstance(content, dict) else (None, None)
    if kind != (FORMAT, VERSION):
        raise ValueError(f"found {kind[0]} version {kind[1]}, expected {FORMAT} version {VERSION}")
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        raise ValueError("; ".join(one["msg"] for one in error.errors()[:4])) from error
