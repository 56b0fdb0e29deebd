"""Systems of which an iteration is a number of equal calls to workers: their turns, the columns of a payload,
and a Ray of their own."""

import os
from collections.abc import Callable
from typing import Any

# float32, beside tokens
NAMES = (
    "sampled_logprobs",
    "logprobs",
    "ref_logprobs",
    "values",
    "rewards",
    "advantages",
    "returns",
    "weights",
)
RAY: dict[str, Any] = {
    "num_cpus": 16,
    "include_dashboard": False,
    "_node_ip_address": "127.0.0.1",
    "object_store_memory": 512 << 20,
    "log_to_driver": False,
}


class Iterations:
    """Iterations of ``flags["calls"]`` calls each, ``flags["iterations"]`` in all. call: makes one and gives
    its wall seconds; tokens: of its payload; moved: the bytes that went from process to process since it was
    called last, None where that is not known."""

    def __init__(
        self,
        flags: dict[str, Any],
        call: Callable[[], float],
        tokens: int = 0,
        moved: Callable[[], int] | None = None,
    ) -> None:
        self.calls = flags["calls"]
        self.count = flags["iterations"]
        self.call = call
        self.tokens = tokens
        self.number = 0
        self.moved = moved

    def next(self, count: int) -> dict[str, Any]:
        """The next iterations, as a system answers `iterate`."""
        rows = []
        for _ in range(min(count, self.count - self.number)):
            wall = sum(self.call() for _ in range(self.calls))
            bytes_moved = {} if self.moved is None else {"bytes": self.moved()}
            rows.append(
                {
                    "iteration": self.number,
                    "wall": wall,
                    "tokens": self.tokens * self.calls,
                    "metrics": {},
                    **bytes_moved,
                }
            )
            self.number += 1
        return {"iterations": rows, "evaluations": [], "ended": self.number == self.count}


def start_ray() -> None:
    """Start a Ray of this process alone, on the loopback address."""
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    import ray

    ray.init("local", **RAY)
