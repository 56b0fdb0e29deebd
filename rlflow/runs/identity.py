"""A run's identity: what its numbers depend on beside its settings and its graph, each part under a name of its own, so that whoever goes
on with the run is told what is another now, from what to what."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlflow.checkpoints import durable
from rlflow.errors import printable

FILE = "identity.json"
GONE = "nothing"
UNREAD = "not read before the run was stopped"
UNSTEADY = "changed while it was read"
SHOWN = 60  # letters of a value that are shown


class WeightFile(BaseModel):
    """A file of weights. While length, times and inode are the same nobody has written to it, so that it need not be read again."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    bytes: int
    modified: int  # nanoseconds since the epoch, of the last change of its content
    changed: int  # nanoseconds since the epoch, of the last change of its inode
    inode: int
    recent: bool = False  # whether it was changed so shortly before that a later change may have the same time
    # of its bytes; None where it has not been read yet
    sha256: Annotated[str, Field(pattern=rf"^([0-9a-f]{{64}}|{UNSTEADY})$")] | None = None

    def same_file(self, other: WeightFile) -> bool:
        """Whether nobody wrote to it in between, as far as that can be told without reading."""
        return (self.bytes, self.modified, self.changed, self.inode) == (other.bytes, other.modified, other.changed, other.inode)

    def with_digest(self, digits: str | None) -> WeightFile:
        """The file with the digest of its bytes."""
        return self.model_copy(update={"sha256": digits})


class Identity(BaseModel):
    """The inputs that the numbers of a run depend on, each part under a name of its own."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    format: Literal["rlflow-identity"] = "rlflow-identity"
    version: Literal[1] = 1
    kept: dict[str, str] = Field(default_factory=dict)  # parts that must be the same when the run goes on
    told: dict[str, str] = Field(default_factory=dict)  # parts of which a change is reported, such as versions of packages
    weights: dict[str, WeightFile] = Field(default_factory=dict)  # files of weights, which are compared by their digests

    def encode(self) -> bytes:
        """The content of identity.json."""
        return f"{json.dumps(self.model_dump(), indent=1)}\n".encode()


@dataclass(frozen=True)
class Change:
    """A part that is another now. Prints as a line."""

    name: str
    before: str
    now: str

    def __str__(self) -> str:
        return printable(f"{self.name}: {shortened(self.before)} → {shortened(self.now)}")


def shortened(value: str) -> str:
    """A value for a line; of a digest its first letters."""
    kind, _, digits = value.partition(" ")
    if kind == "sha256":
        return f"sha256 {digits[:12]}"
    return value if len(value) <= SHOWN else value[: SHOWN - 1] + "…"


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[Change]:
    """Parts that changed, went or came."""
    names = list(dict.fromkeys((*before, *now)))
    return [Change(name, before.get(name, GONE), now.get(name, GONE)) for name in names if before.get(name) != now.get(name)]


def read(folder: Path) -> Identity | None:
    """The identity that a run left; None where it left none. Raises ValueError for one that is damaged or of another version."""
    try:
        return Identity.model_validate_json(durable.read(folder / FILE))
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error.strerror
        raise ValueError(f"{FILE} cannot be read: {reason}") from error
