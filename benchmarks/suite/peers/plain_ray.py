"""Plain Ray calls without a payload.

Each stage calls every actor, then waits for all of them with one `ray.get`.
"""

import time
from typing import Any

from _calls import Iterations, start_ray  # type: ignore[import-not-found]


class System:
    """The system that makes plain Ray calls.

    ``cell["flags"]``: workers, stages, calls (chains per iteration), iterations.
    """

    def prepare(self, cell: dict[str, Any], folder: str, seed: int) -> dict[str, Any]:
        """Start the actors."""
        start_ray()
        import ray

        class Actor:
            def step(self) -> int:
                return 0

        flags = self.flags = cell["flags"]
        self.actors: list[Any] = [ray.remote(num_cpus=0)(Actor).remote() for _ in range(flags["workers"])]
        self.iterations = Iterations(flags, self.chain)
        return {"iterations": flags["iterations"]}

    def chain(self) -> float:
        """Run the chain and return its seconds."""
        import ray

        start = time.perf_counter()
        for _ in range(self.flags["stages"]):
            ray.get([actor.step.remote() for actor in self.actors])
        return time.perf_counter() - start

    def iterate(self, count: int) -> dict[str, Any]:
        """Run the next iterations, and return their wall seconds."""
        turn: dict[str, Any] = self.iterations.next(count)
        return turn

    def observe(self) -> dict[str, Any]:
        """Return an empty dict, since this system adds no measurements of its own."""
        return {}

    def close(self) -> None:
        """End the actors."""
        import ray

        ray.shutdown()
