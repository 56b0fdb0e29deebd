"""A call of verl's RayWorkerGroup with DP_COMPUTE_PROTO: the driver holds the DataProto, splits it over the
workers and gets the result.

The method reads nine columns, one int64 and eight float32, and gives one of them. verl is installed without
what it requires, which would bring the CUDA build of torch and much that a controller needs not; what its
controller imports stands in REQUIRES."""

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
    """``cell["flags"]``: workers, rows, tokens (of a row), calls (of an iteration), iterations."""

    def prepare(self, cell: dict[str, Any], folder: str, seed: int) -> dict[str, Any]:
        """Start the workers, and see that a call gives what it should."""
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
            raise RuntimeError("a call gave other rows than it got")
        # what frames them is not known
        moved = sum(column.nbytes for column in (*columns.values(), columns["values"])) * flags["calls"]
        self.iterations = Iterations(flags, self.call, flags["rows"] * flags["tokens"], lambda: moved)
        return {"iterations": flags["iterations"]}

    def call(self) -> float:
        """The seconds of a call."""
        start = time.perf_counter()
        self.workers.step(self.data)
        return time.perf_counter() - start

    def iterate(self, count: int) -> dict[str, Any]:
        """The next iterations, with their wall seconds and the tokens of their payloads."""
        turn: dict[str, Any] = self.iterations.next(count)
        return turn

    def observe(self) -> dict[str, Any]:
        """Nothing beside what every cell is measured by."""
        return {}

    def close(self) -> None:
        """End the workers."""
        import ray

        ray.shutdown()
