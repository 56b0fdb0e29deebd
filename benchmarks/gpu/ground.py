"""The conditions under which a section runs: device, folder, small or large models.

The methods import torch only when they need it, because the supervising process must not load it.
"""

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
    """The conditions under which a section runs.

    ``device``: cuda or cpu. ``small``: small models and few rows, for a CPU. ``folder``: for files, deleted
    afterwards. ``start``: start method of processes (``supervise.context``).
    """

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
        """Wait until the device has finished its work."""
        if self.gpu:
            import torch

            torch.cuda.synchronize()

    def free(self) -> None:
        """Return unused memory to the device."""
        if self.gpu:
            import torch

            gc.collect()
            torch.cuda.ipc_collect()  # releases memory that other processes had opened and have closed
            torch.cuda.empty_cache()

    def allocated(self) -> int:
        """Return the bytes that tensors use on the device; 0 on a CPU."""
        if not self.gpu:
            return 0
        import torch

        return torch.cuda.memory_allocated()

    def peak(self, call: Callable[[], object]) -> int:
        """Return the peak number of bytes that tensors use on the device during a call; 0 on a CPU."""
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
        """Return the median time of a call in seconds, over ``times`` calls after one warm-up call."""
        found = []
        for _ in range(times + 1):
            self.settle()
            began = time.perf_counter()
            call()
            self.settle()
            found.append(time.perf_counter() - began)
        return statistics.median(found[1:])

    def rows(self, few: int, many: int) -> int:
        """Return the number of rows to use: ``few`` with small models, otherwise ``many``."""
        return few if self.small else many
