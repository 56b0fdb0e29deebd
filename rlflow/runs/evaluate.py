"""Evaluation on held-out prompts: the same prompts and the same chance each time, so that two numbers differ by the weights alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rlflow.batch import Batch
from rlflow.columns import SOURCE
from rlflow.execution.engine import JUDGE, Engine
from rlflow.seeds import derived
from rlflow.training.protocols import Sampling

CHUNK = 1024


@dataclass(frozen=True)
class Accuracy:
    """Share of held-out answers that score 1.0: sampled at temperature 1, and greedy."""

    sampled: float
    greedy: float
    roles: dict[str, dict[str, float]] = field(default_factory=dict)  # where several roles are evaluated, all shares of each
    sources: dict[str, float] = field(default_factory=dict)  # where data have several sources, shares as sampled/NAME and greedy/NAME


@dataclass(frozen=True)
class Evaluation:
    """Measures the accuracy of a role on held-out prompts, judged by the engine's scorer JUDGE. ``others``: of further roles."""

    engine: Engine
    role: str
    prompts: Batch
    sampling: Sampling
    others: tuple[Evaluation, ...] = ()

    def __call__(self) -> Accuracy:
        """The accuracy of the role, and by name of each where there are several."""
        shares = {each.role: each._shares("sampled", 1.0) | each._shares("greedy", 0.0) for each in (self, *self.others)}
        own = shares[self.role]
        sources = {name: share for name, share in own.items() if "/" in name}
        return Accuracy(own["sampled"], own["greedy"], shares if self.others else {}, sources)

    def answers(self, count: int) -> list[dict[str, str]]:
        """The first ``count`` prompts, the right answers where the data have them, and what the model samples."""
        rows = self._sampled(self.prompts.rows(range(min(count, len(self.prompts)))), 1.0)
        names = [name for name in ("prompt", "answer", "completion") if name in rows]
        rows = self.engine.fetch(rows.select(*names))
        self.engine.finished()
        role = {"role": self.role} if self.others else {}
        return [role | dict(zip(names, values, strict=True)) for values in zip(*(rows[name] for name in names), strict=True)]

    def _shares(self, name: str, temperature: float) -> dict[str, float]:
        """The share of all prompts, as ``name``, and of those of each source, as ``name/SOURCE``."""
        right = self._right(temperature)
        shares = {name: sum(right) / len(right)}
        if SOURCE in self.prompts:
            by_source: dict[str, list[bool]] = {}
            for source, hit in zip(self.prompts[SOURCE], right, strict=True):
                by_source.setdefault(source, []).append(hit)
            shares |= {f"{name}/{source}": sum(hits) / len(hits) for source, hits in by_source.items()}
        return shares

    def _right(self, temperature: float) -> list[bool]:
        """Whether each prompt is answered right."""
        right: list[bool] = []
        for start in range(0, len(self.prompts), CHUNK):
            part = self.prompts.rows(range(start, min(start + CHUNK, len(self.prompts))))
            scores = self.engine.reward(JUDGE, self._sampled(part, temperature))[0]
            right += (self.engine.fetch(scores)["scores"] == 1.0).tolist()
            self.engine.finished()
        return right

    def _sampled(self, prompts: Batch, temperature: float) -> Batch:
        """The prompts' rows with completions: one each, from seeds that are the same at every evaluation."""
        sampling = replace(self.sampling, temperature=temperature)
        rows = self.engine.sample(self.role, prompts.select("prompt_tokens"), sampling, derived(self.engine.seed, "evaluation"))
        assert rows.axis.index is not None
        carried = {name: data.take(rows.axis.index, prompts.axis) for name, data in prompts.data.items()}
        return Batch(rows.axis, carried | rows.data)


def shown(accuracy: Accuracy) -> Mapping[str, float]:
    """An accuracy as metrics: that of the first role, by source of data where there are several, and where there are several roles that of
    each by name."""
    named = {f"evaluation/{name}": share for name, share in accuracy.sources.items()}
    named |= {f"evaluation/{role}/{name}": share for role, shares in accuracy.roles.items() for name, share in shares.items()}
    return {"evaluation/sampled": accuracy.sampled, "evaluation/greedy": accuracy.greedy, **named}
