"""Evaluation on held-out prompts: the same prompts and the same chance each time, so that two numbers differ by the weights alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from rlflow.batch import Batch
from rlflow.columns import SOURCE
from rlflow.execution.engine import JUDGE, Engine
from rlflow.execution.executor import Executor, Outcome
from rlflow.execution.lanes import Lanes
from rlflow.plan import Plan
from rlflow.seeds import derived
from rlflow.training.protocols import Sampling

CHUNK = 1024  # prompts that are sampled from at once
PART = 256  # prompts that a flow's own evaluation gets at once: it may sample many rows of each


@dataclass(frozen=True)
class Accuracy:
    """Share of held-out answers that score 1.0: sampled at temperature 1, and greedy; or of the rows that a flow's own evaluation returns,
    with the mean of their scores."""

    sampled: float
    greedy: float | None = None
    roles: dict[str, dict[str, float]] = field(default_factory=dict)  # where several roles are evaluated, all shares of each
    sources: dict[str, float] = field(default_factory=dict)  # where data have several sources, shares as sampled/NAME and greedy/NAME
    score: float | None = None  # of a flow's own evaluation, without those that are missing; None where all are


@dataclass(frozen=True)
class Evaluation:
    """Measures the accuracy of a role on held-out prompts, judged by the engine's scorer JUDGE. ``others``: of further roles; ``named``:
    whether figures and answers say which role they are of."""

    lanes: Lanes
    engine: Engine
    role: str
    prompts: Batch
    sampling: Sampling
    others: tuple[Evaluation, ...] = ()
    named: bool = False

    def __call__(self) -> Accuracy:
        """The accuracy of the role, and by name where there are several."""
        return self.lanes.do("model", self._accuracy)

    def _accuracy(self) -> Accuracy:
        shares = {each.role: each._shares("sampled", 1.0) | each._shares("greedy", 0.0) for each in (self, *self.others)}
        own = shares[self.role]
        sources = {name: share for name, share in own.items() if "/" in name}
        return Accuracy(own["sampled"], own["greedy"], shares if self.named else {}, sources)

    def answers(self, count: int) -> list[dict[str, str]]:
        """The first ``count`` prompts, the right answers where the data have them, and what the model samples."""
        return self.lanes.do("model", partial(self._answers, count))

    def _answers(self, count: int) -> list[dict[str, str]]:
        rows = self._sampled(self.prompts.rows(range(min(count, len(self.prompts)))), 1.0)
        names = [name for name in ("prompt", "answer", "completion") if name in rows]
        rows = self.engine.fetch(rows.select(*names))
        self.engine.finished()
        role = {"role": self.role} if self.named else {}
        return [role | dict(zip(names, values, strict=True)) for values in zip(*(rows[name] for name in names), strict=True)]

    def _shares(self, name: str, temperature: float) -> dict[str, float]:
        """The share of all prompts, as ``name``, and of those of each source, as ``name/SOURCE``."""
        right, several = self._right(temperature), SOURCE in self.prompts
        return {name: sum(right) / len(right)} | by_source(name, self.prompts[SOURCE] if several else (), right)

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


def by_source(name: str, sources: Sequence[str], right: Sequence[bool]) -> dict[str, float]:
    """The share of right answers of each source, as ``name/SOURCE``. ``sources``: of the answers; none where the data have one source."""
    hits: dict[str, list[bool]] = {}
    for source, hit in zip(sources, right, strict=bool(sources)):
        hits.setdefault(source, []).append(hit)
    return {f"{name}/{source}": sum(each) / len(each) for source, each in hits.items()}


@dataclass(frozen=True)
class FlowEvaluation:
    """Runs a flow's own evaluation on held-out prompts, with the rewards of the flow."""

    executor: Executor
    plan: Plan
    prompts: Batch

    def __call__(self) -> Accuracy:
        """The share of the rows it returns that score 1.0, 0 where it returns none, and the mean of their scores."""
        scores: list[float] = []
        sources: list[str] = []
        for start in range(0, len(self.prompts), PART):
            prompts = self.prompts.rows(range(start, min(start + PART, len(self.prompts))))
            rows = self._rows(prompts, ("scores",))
            scores += rows["scores"].double().tolist()
            index = prompts.axis.rows_of(rows.axis) if SOURCE in prompts else None
            sources += [prompts[SOURCE][row] for row in index.tolist()] if index is not None else []
        right, there = [score == 1.0 for score in scores], [score for score in scores if not math.isnan(score)]
        mean = sum(there) / len(there) if there else None
        return Accuracy(sum(right) / max(len(right), 1), sources=by_source("sampled", sources, right), score=mean)

    def answers(self, count: int) -> list[dict[str, str]]:
        """The first ``count`` prompts, the right answers where the data have them, and the first completion that the evaluation returns for
        each; empty for a prompt of which it returns none."""
        prompts = self.prompts.rows(range(min(count, len(self.prompts))))
        rows = self._rows(prompts, ("completion",), first=True)
        completions = dict(zip(rows.axis.keys[:, 0].tolist(), rows["completion"], strict=True)) if "completion" in rows else {}
        names = [name for name in ("prompt", "answer") if name in prompts]
        return [dict(zip(names, values, strict=True)) | {"completion": completions.get(position, "")}
                for position, *values in zip(prompts.axis.keys[:, 0].tolist(), *(prompts[name] for name in names), strict=True)]

    def _rows(self, prompts: Batch, names: tuple[str, ...], first: bool = False) -> Batch:
        """Columns of the rows that the evaluation returns, as far as it has them. ``first``: of the first row of each prompt alone."""
        executor = self.executor.evaluating()
        try:
            rows = executor.run_body(self.plan, prompts, Outcome(), {})
            rows = rows.select(*(name for name in names if name in rows))
            positions = rows.axis.keys[:, 0].tolist()
            return executor.engine.fetch(rows.rows([positions.index(position) for position in dict.fromkeys(positions)]) if first else rows)
        finally:
            executor.engine.finished()


def shown(accuracy: Accuracy) -> Mapping[str, float]:
    """An accuracy as metrics: that of the first role, or of the flow's own evaluation, by source of data where there are several, and where
    roles are named that of each by name."""
    named = {f"evaluation/{name}": share for name, share in accuracy.sources.items()}
    named |= {f"evaluation/{role}/{name}": share for role, shares in accuracy.roles.items() for name, share in shares.items()}
    figures = {"sampled": accuracy.sampled, "greedy": accuracy.greedy, "score": accuracy.score}
    return {f"evaluation/{name}": value for name, value in figures.items() if value is not None} | named
