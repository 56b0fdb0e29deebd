"""Calls of verl's RayWorkerGroup with DP_COMPUTE_PROTO.

The driver splits a DataProto over the workers and gets the result. The called method reads nine columns (one
int64, eight float32) and returns one. verl is installed without its dependencies, which would install the
CUDA build of torch and packages that verl's controller does not need. REQUIRES lists the packages that the
controller imports.
"""

import time
from typing import Any

from _calls import NAMES, Iterations, start_ray  # type: ignore[import-not-found]

REQUIRES = (
    "torch",
    "ray",
    "numpy",
    "tensordict==0.10.0",
    "omegaconf==2.4.0",
    "codetiming==1.4.0",
    "transformers==5.10.4",
)
WITHOUT_DEPENDENCIES = ("verl==0.9.1",)


class System:
    """The system that makes verl's calls.

    ``cell["flags"]``: workers, rows, tokens (per row), calls (per iteration), iterations.
    """

    def prepare(self, cell: dict[str, Any], folder: str, seed: int) -> dict[str, Any]:
        """Start the workers and check the result of one call."""
        start_ray()
        import ray
        import torch
        from verl import DataProto
        from verl.single_controller.base import Worker
        from verl.single_controller.base.decorator import Dispatch, register
        from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

        class Stage(Worker):  # type: ignore[misc]
            @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)  # type: ignore[untyped-decorator]
            def step(self, data: Any) -> Any:
                return DataProto.from_single_dict({"values": data.batch["values"]})

        torch.set_num_threads(1)
        flags = cell["flags"]
        shape = flags["rows"], flags["tokens"]
        columns = {"tokens": torch.ones(shape, dtype=torch.int64)} | {
            name: torch.rand(shape) for name in NAMES
        }
        self.data = DataProto.from_single_dict(columns)
        pool = RayResourcePool([flags["workers"]], use_gpu=False, max_colocate_count=1)
        self.workers = RayWorkerGroup(
            pool, RayClassWithInitArgs(ray.remote(Stage)), use_gpu=False, device_name="cpu"
        )
        if not torch.equal(self.workers.step(self.data).batch["values"], columns["values"]):
            raise RuntimeError("the result of a call differs from its input column")
        # the size of message headers is not known
        moved = sum(column.nbytes for column in (*columns.values(), columns["values"])) * flags["calls"]
        self.iterations = Iterations(flags, self.call, flags["rows"] * flags["tokens"], lambda: moved)
        return {"iterations": flags["iterations"]}

    def call(self) -> float:
        """Make a call and return its seconds."""
        start = time.perf_counter()
        self.workers.step(self.data)
        return time.perf_counter() - start

    def iterate(self, count: int) -> dict[str, Any]:
        """Run the next iterations. Returns their wall seconds and the numbers of tokens in their payloads."""
        turn: dict[str, Any] = self.iterations.next(count)
        return turn

    def observe(self) -> dict[str, Any]:
        """Return an empty dict, since this system adds no measurements of its own."""
        return {}

    def close(self) -> None:
        """End the workers."""
        import ray

        ray.shutdown()
