"""A chain of empty stages that the executor runs on a pool.

The time is measured from the start of the first stage to the end of the last.
"""

from pathlib import Path
from typing import Any

from rlflow.benchmarks.peers._calls import Iterations
from rlflow.runs.api import roles

PROMPTS = 64
FLOW = """
from rlflow import flow, loss, stage

@stage(gives="scores")
def step(scores):
    return scores

@loss(unrewarded="the flow is there to be timed")
def nothing(new, scores):  # so that the update waits for the chain
    return new.logprobs, {{}}

@flow
def chain(prompts, actor, reward):
    batch = actor.generate(prompts, samples=1, max_tokens=4)
    batch |= reward(batch)
    for _ in range({stages}):
        batch |= step(batch)
    actor.update(batch, nothing)
"""


class System:
    """The system that runs a chain of empty stages, with models of the null backend.

    ``cell["flags"]``: workers, stages, calls (chains per iteration), iterations.
    """

    def prepare(self, cell: dict[str, Any], folder: str, seed: int) -> dict[str, Any]:
        """Start the workers."""
        flags = self.flags = cell["flags"]
        file = Path(folder) / "chain.py"
        file.write_text(FLOW.format(stages=flags["stages"]))
        self.roles = roles(
            str(file), backend="null", pools=f"all={flags['workers']}", prompts=PROMPTS, threads=1
        )
        self.iterations = Iterations(flags, self.chain)
        return {"iterations": flags["iterations"]}

    def chain(self) -> float:
        """Run the chain and return its seconds.

        Raises RuntimeError if the number of executed stages is wrong.
        """
        outcome = self.roles.prepared.executor.run(self.roles.plan, self.roles.take())
        spans = [span for span in outcome.spans if span.node.startswith("step")]
        if len(spans) != self.flags["stages"]:
            raise RuntimeError(f"the wrong number of stages ran: {len(spans)}")
        return max(span.end for span in spans) - min(span.start for span in spans)

    def iterate(self, count: int) -> dict[str, Any]:
        """Run the next iterations, and return their wall seconds."""
        return self.iterations.next(count)

    def observe(self) -> dict[str, Any]:
        """Return an empty dict, since this system adds no measurements of its own."""
        return {}

    def close(self) -> None:
        """End the workers."""
        if hasattr(self, "roles"):
            self.roles.close()
