"""Evaluation on held-out prompts: the same prompts and the same chance each time, so that two numbers differ by the weights alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rlflow.batch import Batch
from rlflow.execution.engine import JUDGE, Engine
from rlflow.seeds import derived
from rlflow.training.protocols import Sampling

CHUNK = 1024


@dataclass(frozen=True)
class Accuracy:
    """Share of held-out answers that score 1.0: sampled at temperature 1, and greedy."""

    sampled: float
    greedy: float
    roles: dict[str, dict[str, float]] = field(default_factory=dict)  # where several roles are evaluated, both shares of each


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
        shares = {each.role: {"sampled": each._share(1.0), "greedy": each._share(0.0)} for each in (self, *self.others)}
        return Accuracy(**shares[self.role], roles=shares if self.others else {})

    def answers(self, count: int) -> list[dict[str, str]]:
        """The first ``count`` prompts, the right answers where the data have them, and what the model samples."""
        rows = self._sampled(self.prompts.rows(range(min(count, len(self.prompts)))), 1.0)
        names = [name for name in ("prompt", "answer", "completion") if name in rows]
        rows = self.engine.fetch(rows.select(*names))
        self.engine.finished()
        role = {"role": self.role} if self.others else {}
        return [role | dict(zip(names, values, strict=True)) for values in zip(*(rows[name] for name in names), strict=True)]

    def _share(self, temperature: float) -> float:
        right = 0
        for start in range(0, len(self.prompts), CHUNK):
            part = self.prompts.rows(range(start, min(start + CHUNK, len(self.prompts))))
            scores = self.engine.reward(JUDGE, self._sampled(part, temperature))[0]
            right += int((self.engine.fetch(scores)["scores"] == 1.0).sum())
            self.engine.finished()
        return right / len(self.prompts)

    def _sampled(self, prompts: Batch, temperature: float) -> Batch:
        """The prompts' rows with completions: one each, from seeds that are the same at every evaluation."""
        sampling = replace(self.sampling, temperature=temperature)
        rows = self.engine.sample(self.role, prompts.select("prompt_tokens"), sampling, derived(self.engine.seed, "evaluation"))
        assert rows.axis.index is not None
        carried = {name: data.take(rows.axis.index, prompts.axis) for name, data in prompts.data.items()}
        return Batch(rows.axis, carried | rows.data)


def shown(accuracy: Accuracy) -> Mapping[str, float]:
    """An accuracy as metrics: that of the first role, and where there are several that of each by name."""
    named = {f"evaluation/{role}/{name}": share for role, shares in accuracy.roles.items() for name, share in shares.items()}
    return {"evaluation/sampled": accuracy.sampled, "evaluation/greedy": accuracy.greedy, **named}
