"""A snapshot: everything in memory that a run needs to continue after an iteration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlflow.checkpoints import file_names, tensors
from rlflow.checkpoints.plain_state import plain
from rlflow.errors import PlanError

Groups = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True)
class Snapshot:
    """The content of a checkpoint, in memory.

    Raises PlanError if a file name is invalid, safetensors doesn't support a dtype, or the state isn't JSON.
    """

    iteration: int  # number of finished iterations
    #: group, such as ``actor.parameters`` → name → tensor; the tensors must not change while they are written
    #: (see ``host_copy``)
    tensors: Groups = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)  # plain JSON values, copied here
    # ``NAME`` or ``FOLDER/NAME``, such as ``actor/config.json`` → bytes
    files: Mapping[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 <= self.iteration < 10**18:
            raise PlanError.of(
                "checkpoint-iteration",
                "a checkpoint cannot have this iteration number",
                found=str(self.iteration),
                expected="0 or more",
                remedy="count iterations from 0",
            )
        for group, members in self.tensors.items():
            _check_group(group, members)
        for name in self.files:
            if not file_names.is_file(name) or name.removesuffix(".safetensors") in self.tensors:
                raise _refused("file", name, file_names.EXPECTED + ", and not the name of a group's file")
        object.__setattr__(self, "state", plain(self.state))

    @property
    def bytes(self) -> int:
        """The total size of all tensors and files in bytes. On disk, headers and the run's state add to this."""
        return sum(tensors.size(members) for members in self.tensors.values()) + sum(
            len(data) for data in self.files.values()
        )


def _check_group(group: str, members: Mapping[str, Tensor]) -> None:
    if not file_names.is_group(group) or file_names.of_step(group):
        raise _refused("group", group, "letters, digits, '.', '_' and '-'")
    for name, tensor in members.items():
        if name == "__metadata__" or "\0" in name:
            raise _refused("tensor", name, "a name that is not reserved by safetensors")
        if tensor.dtype not in tensors.DTYPES or tensor.layout is not torch.strided:
            raise PlanError.of(
                "checkpoint-dtype",
                f"the tensor '{group}/{name}' cannot be written",
                expected="a dense tensor of a common dtype",
                found=f"{tensor.dtype}, {tensor.layout}",
                remedy="convert it before saving, for example with .to_dense() or .float()",
            )


def _refused(what: str, name: str, expected: str) -> PlanError:
    return PlanError.of(
        "checkpoint-name",
        f"a checkpoint's {what} cannot have this name",
        found=repr(name),
        expected=expected,
        remedy="rename it",
    )


def host_copy(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors to host memory, so that training can continue while the copies are written.

    Tied tensors become separate tensors.
    """
    return {
        name: torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
        for name, tensor in tensors.items()
    }
