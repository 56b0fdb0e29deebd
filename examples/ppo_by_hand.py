"""PPO by hand, in OpenRLHF's order: sample rows; compute reward, actor, critic and reference in parallel;
train critic and actor in parallel; send the actor's weights to the sampler.

The script does the same as ``algorithms/ppo.py``. If every role has one rank, it ends with the same
parameters, bit for bit. In a flow, the scheduler determines the order of calls. Here, the script itself says
which call waits for which. ``python examples/ppo_by_hand.py`` trains the packaged model.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from rlflow.author.batch import Batch
from rlflow.author.functional import gae, truncated_weights
from rlflow.author.seeds import derived, row_seeds
from rlflow.cluster import Job, gather
from rlflow.compiler.trace.compile import TraceOptions, compile_flow
from rlflow.config.roles.bound import Sides, bind_roles
from rlflow.config.roles.loaded_models import make_models
from rlflow.runs.api import resolve_config
from rlflow.runs.assemble import expected_steps
from rlflow.runs.prepare import prepare
from rlflow.training.protocols import Sampling

Weights = dict[str, Tensor]
ppo: Any = import_module("rlflow.algorithms.ppo")  # its stages and losses are called below


class ModelSide:
    """The trainer or the generator of one role of ``ppo``."""

    def __init__(self, role: str, side: str, flags: Mapping[str, Any]) -> None:
        config, self.hp = resolve_config(ppo.ppo, None, flags)
        graph, options = compile_flow(ppo.ppo, self.hp, TraceOptions()).graph, config.options
        bound = bind_roles(graph, config)[role]
        steps = {role: expected_steps(graph, bound.use, options.prompts, options.iterations)}
        wanted = Sides(side == "trainer", side == "generator")
        self.model: Any = getattr(make_models([bound], options, "cpu", steps, lambda _: wanted)[role], side)

    def generate(self, prompts: Batch, seed: int) -> Batch:
        """Sample one response for each row."""
        sampling = Sampling(1, self.hp.max_tokens)
        rows = self.model.generate(
            prompts.select("prompt_tokens"), sampling, row_seeds(seed, prompts.axis.keys)
        )
        return Batch(prompts.axis, rows.data)

    def forward(self, batch: Batch, want: str) -> Batch:
        """Return the column ``want`` of each row."""
        columns: Batch = self.model.forward(batch, (want,))
        return columns

    def update(self, batch: Batch, loss: str, seed: int, settings: Mapping[str, Any]) -> dict[str, float]:
        """Train on all rows, and return metrics."""
        metrics: dict[str, float] = self.model.update(batch, getattr(ppo, loss), seed=seed, **settings)
        return metrics

    def weights(self) -> Weights:
        """Return a copy of all weights."""
        return {name: tensor.detach().clone() for name, tensor in self.model.weights()}

    def receive(self, weights: Weights, version: int) -> None:
        """Use these weights for sampling from now on."""
        self.model.receive(iter(weights.items()), version)


class Task:
    """The prompts of the task, and the scores of responses."""

    def __init__(self, flags: Mapping[str, Any]) -> None:
        config, hp = resolve_config(ppo.ppo, None, flags)
        self.run = prepare(ppo.ppo, hp, config)

    def prompts(self) -> Batch:
        """Return the prompts of the next iteration."""
        return self.run.prompts.take(self.run.options.prompts)

    def score(self, batch: Batch) -> Batch:
        """Return the score of each row."""
        return Batch(
            batch.axis,
            {"scores": Batch.of(scores=self.run.engine.scorers["reward"](batch)[0]).data["scores"]},
        )


def learn(flags: Mapping[str, Any], address: str | None = None) -> tuple[Weights, Weights]:
    """Train with the flags of ``rlflow run ppo``, and return the weights of actor and critic. ``address``:
    the address of a Ray cluster to join."""
    config, hp = resolve_config(ppo.ppo, None, flags)
    call = {node.name: node.call for node in compile_flow(ppo.ppo, hp, TraceOptions()).graph.nodes}
    job = Job("ppo_by_hand", address=address, threads=1)
    task = job.role("task", Task, arguments={"flags": flags})
    sampler, actor, critic, reference = (
        job.role(name, ModelSide, cpus=0.5, arguments={"role": role, "side": side, "flags": flags})
        for name, role, side in (
            ("sampler", "actor", "generator"),
            ("actor", "actor", "trainer"),
            ("critic", "critic", "trainer"),
            ("reference", "reference", "trainer"),
        )
    )
    passes = {"epochs": hp.epochs, "minibatch": hp.minibatch}
    with job:
        for number in range(config.options.iterations):
            seeds = {name: derived(config.options.seed, number, of) for name, of in call.items()}
            batch = task.call_rank0(Task.prompts).result().repeat(hp.samples)
            batch |= sampler.call_batch(ModelSide.generate, batch, seeds["actor.generate"]).result()
            scores, old, values, ref = gather(  # four forwards in parallel
                task.call_batch(Task.score, batch),
                actor.call_batch(ModelSide.forward, batch, "logprobs"),
                critic.call_batch(ModelSide.forward, batch, "values"),
                reference.call_batch(ModelSide.forward, batch, "logprobs"),
            )
            batch |= scores | old | values | ref.rename(logprobs="ref_logprobs")
            batch |= truncated_weights(batch, cap=hp.is_cap)
            batch |= ppo.charge_kl(batch, beta=hp.beta)
            batch |= gae(batch, gamma=hp.gamma, lam=hp.lam)
            batch |= ppo.normalise(batch)
            value = {"clip": hp.value_clip, "huber": hp.value_huber, **passes}
            policy = {"clip": hp.clip, "high": hp.clip_high, "dual": hp.dual_clip, **passes}
            gather(
                critic.call(ModelSide.update, batch, "value_loss", seeds["critic.update"], value),
                actor.call(ModelSide.update, batch, "policy_loss", seeds["actor.update"], policy),
            )
            sampler.call(ModelSide.receive, actor.call_rank0(ModelSide.weights).result(), number + 1).result()
            print(f"{number}: mean score {torch.nanmean(batch['scores']):.3f}")
        return gather(actor.call_rank0(ModelSide.weights), critic.call_rank0(ModelSide.weights))


if __name__ == "__main__":
    learn({})
