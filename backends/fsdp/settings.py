"""What a user may set of the fsdp backend: ``--ROLE.NAME``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge

from rlflow.backends.local import settings as local
from rlflow.errors import PlanError


@dataclass(frozen=True)
class TrainerSettings(local.TrainerSettings):
    """The settings of the local trainer, and how a model lies on the ranks of its pool."""

    # none keeps the whole model on each rank (data parallel): faster, if it fits
    shard: Literal["full", "none"] = "full"
    # adjacent ranks that share each matrix product; more fits wider layers, and talks more
    tensor_parallel: Annotated[int, Ge(1)] = 1

    def __post_init__(self) -> None:
        """Raises PlanError for what does not go together, so that it is said before anything starts."""
        local.refuse_compile(self, "fsdp")
        if self.tensor_parallel > 1 and self.lora:
            raise PlanError.of(
                "tensor-parallel",
                "adapters are not split by tensor parallelism",
                found=f"--lora {self.lora}",
                expected="adapters or tensor parallelism",
                remedy="--tensor-parallel 1, or --lora 0",
            )
