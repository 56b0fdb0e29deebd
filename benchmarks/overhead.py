"""What the engine costs, and what overlap gives. Paired, interleaved, medians.

    python benchmarks/overhead.py [--pairs 20]

1. An iteration of `ppo` over a hand-written loop that calls the same backend functions; recording, evaluation and saving off.
2. A reward function of 0.5 s in a warm process beside a torch forward of 0.5 s of another role.
3. Nodes per second on the null backend, with recording on.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import rlflow
from rlflow.author.load import load_flow
from rlflow.author.loss import Loss
from rlflow.author.stage import Stage
from rlflow.batch import Batch, Data
from rlflow.config.flags import flat
from rlflow.execution.engine import Engine
from rlflow.runs.api import resolve_config
from rlflow.runs.context import RunContext
from rlflow.runs.prepare import prepare
from rlflow.runs.records import Records
from rlflow.seeds import row_seeds
from rlflow.training.protocols import Sampling


def prepared(flow: str, **keywords: Any) -> RunContext:
    loaded = load_flow(flow)
    given, hp = resolve_config(loaded, None, flat(keywords))
    return prepare(loaded, hp, given)


class ByHand:
    """One iteration of `ppo` as a researcher without an engine writes it: the same functions, called in order."""

    def __init__(self, run: RunContext) -> None:
        functions = run.plan.program.functions
        self.hp = run.plan.program.hp
        self.engine: Engine = run.engine
        self.stages = {name: f for name, f in functions.items() if isinstance(f, Stage)}
        self.losses = {name: f for name, f in functions.items() if isinstance(f, Loss)}

    def model(self, role: str) -> Any:
        return self.engine.models[role]

    def stage(self, name: str, batch: Batch, **settings: Any) -> Batch:
        stage = self.stages[name]
        columns = [batch[c] if c in batch.columns else None for c in stage.signature.column_names]
        values = stage.function(*columns, **settings)
        values = values if isinstance(values, tuple) else (values,)
        lengths = batch.data["tokens"].lengths
        kinds = {name: rlflow.columns()[name].kind for name in stage.gives}
        named = zip(kinds, values, strict=True)
        return Batch(batch.axis, {name: Data.trimmed(kinds[name], value, batch.axis, lengths) for name, value in named})

    def iterate(self, prompts: Batch) -> None:
        hp, actor, critic = self.hp, self.model("actor"), self.model("critic")
        actor.synchronise()
        seeds = row_seeds(self.engine.seed_of(0), prompts.axis.repeat(hp.samples).keys)
        rows = actor.generator.generate(prompts.select("prompt_tokens"), Sampling(hp.samples, hp.max_tokens), seeds)
        batch = Batch(rows.axis, {name: data.take(rows.axis.index, prompts.axis) for name, data in prompts.data.items()} | rows.data)
        scores, _ = self.engine.scorers["reward"](batch)
        batch |= Batch(rows.axis, {"scores": Batch.of(scores=scores).data["scores"]})
        batch |= actor.trainer.forward(batch, ("logprobs",))
        batch |= self.stage("truncated_weights", batch, cap=hp.is_cap)
        batch |= self.model("reference").trainer.forward(batch, ("logprobs",)).rename(logprobs="ref_logprobs")
        batch |= critic.trainer.forward(batch, ("values",))
        batch |= self.stage("charge_kl", batch, beta=hp.beta)
        batch |= self.stage("gae", batch, gamma=hp.gamma, lam=hp.lam)
        batch |= self.stage("normalise", batch)
        passes = {"epochs": hp.epochs, "minibatch": hp.minibatch}
        critic.trainer.update(batch, self.losses["critic.update"], seed=1, clip=hp.value_clip, **passes)
        actor.trainer.update(batch, self.losses["actor.update"], seed=2, clip=hp.clip, **passes)
        actor.version += 1


def overhead(pairs: int) -> None:
    """The same prompts, the same models: an iteration by the engine and one by hand, in turn."""
    run = prepared("ppo", held_out=8, iterations=1)
    by_hand, prompts = ByHand(run), run.prompts.take(run.options.prompts)
    engine, hand, ratios = [], [], []
    for pair in range(pairs + 2):
        order = (True, False) if pair % 2 else (False, True)
        seconds = {ours: timed(run, by_hand, prompts, ours) for ours in order}
        if pair >= 2:  # the first two warm up
            engine.append(seconds[True])
            hand.append(seconds[False])
            ratios.append(seconds[True] / seconds[False])
    run.close()
    print(f"iteration of ppo, {len(prompts)} rows, {pairs} pairs: engine {statistics.median(engine):.3f} s, by hand "
          f"{statistics.median(hand):.3f} s, ratio {statistics.median(ratios):.3f} (median of pairs)")


def timed(run: RunContext, by_hand: ByHand, prompts: Batch, ours: bool) -> float:
    start = time.perf_counter()
    if ours:
        run.executor.run(run.plan, prompts)
    else:
        by_hand.iterate(prompts)
    return time.perf_counter() - start


REWARD = "import time\ndef slow(completion):\n    time.sleep(0.5)\n    return 1.0\n"
FLOW = '''
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
def beside(prompts, actor, critic, reward):
    batch = actor.generate(prompts, samples=1, max_tokens=1)
    batch |= reward(batch)
    batch |= busy(batch, seconds=0.5)
    batch |= join(batch)
    actor.update(batch, policy_loss)
'''


def overlap(pairs: int) -> None:
    """One row, so that the reward takes its 0.5 s once."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "reward.py").write_text(REWARD)
        Path(folder, "beside.py").write_text(FLOW)
        run = prepared(f"{folder}/beside.py", backend="null", reward=(f"{folder}/reward.py:slow",), prompts=1, threads=1)
        run.executor.run(run.plan, run.prompts.take(1))  # the worker starts
        walls = []
        for _ in range(pairs):
            start = time.perf_counter()
            run.executor.run(run.plan, run.prompts.take(1))
            walls.append(time.perf_counter() - start)
        run.close()
    print(f"reward of 0.5 s beside a forward of 0.5 s, {pairs} runs: {statistics.median(walls):.3f} s (median)")


CHAIN = '''
from rlflow import RANK0, flow, loss, row, stage

@stage(gives="scores")
def step(scores):
    return scores

@loss
def nothing(new):
    return new.logprobs, {}

@flow
def chain(prompts, actor, reward):
    batch = actor.generate(prompts, samples=1, max_tokens=4)
    batch |= reward(batch)
    for _ in range(96):
        batch |= step(batch)
    actor.update(batch, nothing)
'''


def null_rate(iterations: int = 40) -> None:
    """Nodes of a long chain per second, each iteration recorded as in a run."""
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
    print(f"null backend, {nodes} nodes an iteration, recording on: {rate:.0f} nodes per second")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    pairs = parser.parse_args().pairs
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    overhead(pairs)
    overlap(max(pairs // 2, 5))
    null_rate()


if __name__ == "__main__":
    main()
