"""Shared code for the systems whose iterations are equal calls to workers: turns, payload columns, Ray."""

import os
from collections.abc import Callable
from typing import Any

# float32 columns of the payload, in addition to the tokens
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
    """Runs ``flags["iterations"]`` iterations with ``flags["calls"]`` calls each.

    ``call``: makes one call and returns its wall seconds. ``tokens``: number of tokens in a call's payload.
    ``moved``: returns the bytes sent between processes since its last call; None if unknown.
    """

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
        """Run the next iterations, at most ``count``, and return the answer to `iterate`."""
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
    """Start a Ray cluster for this process alone, on the loopback address."""
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    import ray

    ray.init("local", **RAY)
