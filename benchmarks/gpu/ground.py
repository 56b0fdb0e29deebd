"""What a section stands on: the device, and how large things are there. torch is loaded by who computes, not
by who supervises."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Ground:
    """device: cuda or cpu. small: models and rows for a moment on a CPU. folder: for files, gone afterwards.
    start: how processes are started (``supervise.context``)."""

    device: str
    small: bool
    folder: Path
    start: str = "forkserver"

    @property
    def gpu(self) -> bool:
        return self.device == "cuda"

    # -- the device
    # --------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait until the device has done all that it was told."""
        if self.gpu:
            import torch

            torch.cuda.synchronize()

    def free(self) -> None:
        """What is no longer held goes back to the device."""
        if self.gpu:
            import torch

            gc.collect()
            torch.cuda.ipc_collect()  # what others had opened, and have closed since
            torch.cuda.empty_cache()

    def allocated(self) -> int:
        """Bytes of tensors on the device; on a CPU nobody counts them."""
        if not self.gpu:
            return 0
        import torch

        return torch.cuda.memory_allocated()

    def peak(self, call: Callable[[], object]) -> int:
        """The most bytes of tensors that were on the device during a call."""
        if not self.gpu:
            call()
            return 0
        import torch

        self.free()
        torch.cuda.reset_peak_memory_stats()
        call()
        self.settle()
        return torch.cuda.max_memory_allocated()

    def seconds(self, call: Callable[[], object], times: int = 3) -> float:
        """The median of some calls after one that warms up."""
        found = []
        for _ in range(times + 1):
            self.settle()
            began = time.perf_counter()
            call()
            self.settle()
            found.append(time.perf_counter() - began)
        return statistics.median(found[1:])

    def rows(self, few: int, many: int) -> int:
        return few if self.small else many
