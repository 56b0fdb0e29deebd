"""Canaries: fixed tokens that trainer and generator both score after each sync. Their weights are the same then and nothing is drawn, so
that what differs are kernels and dtypes, or a weight that did not arrive."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rlflow.author.batch import Batch
from rlflow.author.figures import Figure, Of
from rlflow.config.options import Options
from rlflow.config.roles.roles import Roles, has_canary
from rlflow.data.dataset import Dataset
from rlflow.execution.engine import Engine

ROWS = 4
CANARY_TOKENS = 64  # tokens of a canary
ROUNDING = {"bfloat16": 3.0}  # times by which the mean factor may be further from 1 than in float32: tokens of a prompt may be unlikely,
# and those round by the most. Gemma 3 270M has factors of 1.03 to 1.08 between two engines that are both as close to float32.


@dataclass(frozen=True)
class Canary:
    """Scores fixed tokens with the trainer and the generator of roles."""

    engine: Engine
    roles: tuple[str, ...]
    rows: Batch  # the tokens that are scored, and prompts before them
    every: int  # iterations from one time to the next

    def __call__(self, iteration: int) -> dict[Figure, float]:
        """Metrics of each role: the largest and the mean difference of a token's log-prob, and the mean factor between its
        probabilities."""
        if self.every == 0 or iteration % self.every:
            return {}
        metrics: dict[Figure, float] = {}
        for role in self.roles:
            sampler, trainer = self.engine.score(role, self.rows), self.engine.forward(role, ("logprobs",), self.rows)
            one, other = (self.engine.fetch(batch.select("logprobs")).data["logprobs"].value.double() for batch in (sampler, trainer))
            apart = (one - other).abs()
            measured = {"max": apart.max(), "mean": apart.mean(), "factor": apart.exp().mean()}
            metrics |= {Figure(Of.CANARY, name, role=role): float(value) for name, value in measured.items()}
        self.engine.finished()
        return metrics


def canary(roles: Roles, engine: Engine, data: Dataset, options: Options) -> Canary | None:
    """None where there are no roles to compare, or where no prompt has two tokens."""
    names = tuple(name for name, role in roles.items() if has_canary(role, options))
    if not names:
        return None
    rows = canary_rows(data.batch(list(itertools.islice(data.usable(), ROWS))))
    return Canary(engine, names, rows, options.canary) if len(rows) else None


def canary_rows(prompts: Batch) -> Batch:
    """Each prompt cut in two: tokens that are read, and tokens that are scored."""
    tokens = [row[:CANARY_TOKENS] for row in prompts.data["prompt_tokens"].lists() if len(row) > 1]
    return Batch.of(prompt_tokens=[row[: len(row) // 2] for row in tokens], tokens=[row[len(row) // 2 :] for row in tokens])


def canary_warnings(metrics: Mapping[Figure, float], most: float, dtype: str = "float32") -> Iterator[str]:
    """Warnings of canaries that differ by more than a factor of ``most``, or by what rounding makes of it in a shorter dtype."""
    allowed = 1 + (most - 1) * ROUNDING.get(dtype, 1.0)
    limit = f"--max-mismatch {most:g}" + (f", with the rounding of {dtype} {allowed:g}" if allowed > most else "")
    for figure, factor in metrics.items():
        if figure.name == "factor" and factor > allowed:
            yield (f"the sampler of role '{figure.role}' scores fixed tokens otherwise than its trainer, by a factor of {factor:.3g} in "
                   f"the mean ({limit}), log-probs by {metrics[figure._replace(name='max')]:.3g} at most: their dtypes or kernels "
                   "differ, or a weight did not arrive")
