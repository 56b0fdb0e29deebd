"""A hand-written iteration of `ppo`, which calls the same backend's functions in order.

Its cost is the minimum for an iteration: there is no engine, and nothing is recorded, scheduled or saved.
``cell["flags"]`` are flags of `rlflow run`.
"""

import json
import time
from pathlib import Path
from typing import Any

from rlflow.author.batch import Batch, Data
from rlflow.author.columns import columns
from rlflow.author.load import load_flow
from rlflow.author.loss import Loss
from rlflow.author.seeds import row_seeds
from rlflow.author.stage import Stage
from rlflow.config.flags import flat
from rlflow.runs.api import resolve_config
from rlflow.runs.prepare import prepare
from rlflow.training.protocols import Sampling

LENGTHS = "actor.generate.lengths"


class System:
    """Runs `ppo` with the models and prompts of a run that is prepared but not started."""

    def prepare(self, cell: dict[str, Any], folder: str, seed: int) -> dict[str, Any]:
        """Load the models and the data."""
        flags, flow = cell["flags"], load_flow("ppo")
        config, hp = resolve_config(flow, None, flat({**flags, "seed": seed, "out": folder}))
        self.run = prepare(flow, hp, config)
        program = self.run.plan.program
        self.hp, self.engine, self.number = program.hp, self.run.engine, 0
        self.stages = {name: each for name, each in program.functions.items() if isinstance(each, Stage)}
        self.losses = {name: each for name, each in program.functions.items() if isinstance(each, Loss)}
        lengths = json.loads(Path(flags[LENGTHS]).read_text())["lengths"] if LENGTHS in flags else ()
        self.sampling = Sampling(self.hp.samples, self.hp.max_tokens, lengths=tuple(lengths))
        return {"iterations": self.run.options.iterations}

    def iterate(self, count: int) -> dict[str, Any]:
        """Run the next iterations. Returns their wall seconds and numbers of sampled tokens."""
        rows, whole = [], self.run.options.iterations
        for _ in range(min(count, whole - self.number)):
            start = time.perf_counter()
            tokens = self.step(self.run.prompts.take(self.run.options.prompts))
            rows.append(
                {
                    "iteration": self.number,
                    "wall": time.perf_counter() - start,
                    "tokens": tokens,
                    "metrics": {},
                }
            )
            self.number += 1
        return {"iterations": rows, "evaluations": [], "ended": self.number == whole}

    def step(self, prompts: Batch) -> int:
        """Run one iteration, and return the number of sampled tokens."""
        hp, engine, seed = self.hp, self.engine, self.engine.seed_of(self.number)
        models: dict[str, Any] = dict(engine.models)
        actor, critic, reference = models["actor"], models["critic"], models["reference"]
        actor.synchronise()
        seeds = row_seeds(seed, prompts.axis.repeat(hp.samples).keys)
        rows = actor.generator.generate(prompts.select("prompt_tokens"), self.sampling, seeds)
        batch: Batch = Batch(
            rows.axis,
            {name: data.take(rows.axis.index, prompts.axis) for name, data in prompts.data.items()}
            | rows.data,
        )
        scores, _ = engine.scorers["reward"](batch)
        batch |= Batch(rows.axis, {"scores": Batch.of(scores=scores).data["scores"]})
        batch |= actor.trainer.forward(batch, ("logprobs",))
        batch |= self.stage("truncated_weights", batch, cap=hp.is_cap)
        batch |= reference.trainer.forward(batch, ("logprobs",)).rename(logprobs="ref_logprobs")
        # the critic's update reuses this forward, as in the plan of `ppo`
        batch |= critic.trainer.forward_ahead(batch, ("values",))
        batch |= self.stage("charge_kl", batch, beta=hp.beta)
        batch |= self.stage("gae", batch, gamma=hp.gamma, lam=hp.lam)
        batch |= self.stage("normalise", batch)
        passes = {"epochs": hp.epochs, "minibatch": hp.minibatch}
        critic.trainer.update(
            batch, self.losses["critic.update"], seed=seed + 1, clip=hp.value_clip, **passes
        )
        actor.trainer.update(batch, self.losses["actor.update"], seed=seed + 2, clip=hp.clip, **passes)
        actor.version += 1
        return int(batch["mask"].sum())

    def stage(self, name: str, batch: Batch, **settings: Any) -> Batch:
        """Call a stage with the columns that it reads, and return the columns that it produces."""
        stage = self.stages[name]
        inputs = [
            batch[column] if column in batch.columns else None for column in stage.signature.column_names
        ]
        values = stage.function(*inputs, **settings)
        values = values if isinstance(values, tuple) else (values,)
        lengths, kinds = batch.data["tokens"].lengths, {each: columns()[each].kind for each in stage.gives}
        return Batch(
            batch.axis,
            {
                each: Data.trimmed(kind, value, batch.axis, lengths)
                for (each, kind), value in zip(kinds.items(), values, strict=True)
            },
        )

    def observe(self) -> dict[str, Any]:
        """Return an empty dict, since this system adds no measurements of its own."""
        return {}

    def close(self) -> None:
        """End the reward processes."""
        if hasattr(self, "run"):
            self.run.close()
