"""Measure the overlap of a reward with a forward pass, and the nodes per second of the executor.

    python benchmarks/overhead.py [--times 10]

1. Median time of a reward function of 0.5 s in a warm process, in parallel with another role's torch forward
   pass of 0.5 s.
2. Nodes per second on the null backend, with recording on.

`rlflow bench overhead` compares an iteration with a hand-written loop.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from rlflow.author.load import load_flow
from rlflow.config.flags import flat
from rlflow.runs.api import resolve_config
from rlflow.runs.context import RunContext
from rlflow.runs.prepare import prepare
from rlflow.runs.records import Records


def prepared(flow: str, **keywords: Any) -> RunContext:
    loaded = load_flow(flow)
    given, hp = resolve_config(loaded, None, flat(keywords))
    return prepare(loaded, hp, given)


REWARD = "import time\ndef slow(completion):\n    time.sleep(0.5)\n    return 1.0\n"
FLOW = """
import torch
from rlflow import flow, loss, stage

@stage(gives="values", on="critic")
def busy(critic, tokens, mask, *, seconds):
    x, end = torch.randn(256, 256), __import__("time").perf_counter() + seconds
    while __import__("time").perf_counter() < end:
        x = torch.tanh(x @ x)
    return torch.zeros(mask.shape)

@stage(gives="advantages")
def join(scores, values, mask):
    return torch.where(mask, scores[:, None] - values, 0.0)

@loss
def policy_loss(new, advantages):
    return -new.logprobs * advantages, {}

@flow
def parallel(prompts, actor, critic, reward):
    batch = actor.generate(prompts, samples=1, max_tokens=1)
    batch |= reward(batch)
    batch |= busy(batch, seconds=0.5)
    batch |= join(batch)
    actor.update(batch, policy_loss)
"""


def overlap(times: int) -> None:
    """Time a flow with a reward and a forward pass of 0.5 s each.

    The flow has one row, so that the reward runs once.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "reward.py").write_text(REWARD)
        Path(folder, "parallel.py").write_text(FLOW)
        run = prepared(
            f"{folder}/parallel.py",
            backend="null",
            reward=(f"{folder}/reward.py:slow",),
            prompts=1,
            threads=1,
        )
        run.executor.run(run.plan, run.prompts.take(1))  # the first iteration starts the worker
        sandboxes = []
        for _ in range(times):
            start = time.perf_counter()
            run.executor.run(run.plan, run.prompts.take(1))
            sandboxes.append(time.perf_counter() - start)
        run.close()
    print(
        f"reward of 0.5 s and forward of 0.5 s in parallel, {times} runs: {statistics.median(sandboxes):.3f} s (median)"
    )


CHAIN = """
from rlflow import RANK0, flow, loss, row, stage

@stage(gives="scores")
def step(scores):
    return scores

@loss(unrewarded="a chain of nodes whose time is measured")
def nothing(new):
    return new.logprobs, {}

@flow
def chain(prompts, actor, reward):
    batch = actor.generate(prompts, samples=1, max_tokens=4)
    batch |= reward(batch)
    for _ in range(96):
        batch |= step(batch)
    actor.update(batch, nothing)
"""


def null_rate(iterations: int = 40) -> None:
    """Print the nodes per second of a long chain. Iterations are recorded as in a normal run."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "chain.py").write_text(CHAIN)
        run = prepared(f"{folder}/chain.py", backend="null", prompts=8)
        records, nodes = Records(Path(folder)), len(run.plan.live) - 1
        start = time.perf_counter()
        for iteration in range(iterations):
            outcome = run.executor.run(run.plan, run.prompts.take(8))
            records.metrics(iteration, outcome.metrics)
            records.samples(iteration, outcome.summary.rows)
            records.timeline(iteration, outcome)
        rate = iterations * nodes / (time.perf_counter() - start)
        records.close()
        run.close()
    print(f"null backend, {nodes} nodes per iteration, recording on: {rate:.0f} nodes per second")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=10)
    times = parser.parse_args().times
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    overlap(times)
    null_rate()


if __name__ == "__main__":
    main()
