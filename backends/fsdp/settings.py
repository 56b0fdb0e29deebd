"""Options of the fsdp backend, which users set with ``--ROLE.NAME``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge

from rlflow.backends.local import settings as local
from rlflow.errors import PlanError


@dataclass(frozen=True)
class TrainerSettings(local.TrainerSettings):
    """The local trainer's options, plus how the model is split across ranks."""

    # none keeps the complete model on each rank (data parallel): faster, if it fits
    shard: Literal["full", "none"] = "full"
    # adjacent ranks that share each matrix product; more fits wider layers, and communicates more
    tensor_parallel: Annotated[int, Ge(1)] = 1

    def __post_init__(self) -> None:
        """Raise PlanError if options can't be combined."""
        local.refuse_compile(self, "fsdp")
        if self.tensor_parallel > 1 and self.lora:
            raise PlanError.of(
                "tensor-parallel",
                "adapters cannot be combined with tensor parallelism",
                found=f"--lora {self.lora}",
                expected="adapters or tensor parallelism",
                remedy="--tensor-parallel 1, or --lora 0",
            )
