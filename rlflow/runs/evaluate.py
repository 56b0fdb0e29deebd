"""Evaluation on held-out prompts.

Every evaluation uses the same prompts and seeds, so results differ only if the weights do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from rlflow.author.batch import Batch
from rlflow.author.columns import SOURCE
from rlflow.author.figures import Figure, Of
from rlflow.author.methods import OF_EPISODES
from rlflow.author.seeds import derived
from rlflow.compiler.plan import Plan
from rlflow.config.roles.judging import SAMPLED, HeldOutJudge
from rlflow.execution.engine import Engine
from rlflow.execution.executor import Executor
from rlflow.execution.iteration_outcome import Outcome
from rlflow.execution.queues import Queues
from rlflow.rewards.values import ANSWER as PRED
from rlflow.runs.outcomes import Answers, repeated_figures
from rlflow.training.protocols import Sampling

CHUNK = 1024  # answers that are sampled at once
PART = 256  # prompts that a flow's own evaluation gets at once: it may sample many rows for each


@dataclass(frozen=True)
class Accuracy:
    """The shares of answers to held-out prompts that score 1.0, sampled at temperature 1 and greedily.

    If the flow has an evaluation of its own, ``sampled`` is the share of its rows that score 1.0, and
    ``score`` is their mean score. ``sampled`` is None if no prompts are held out from the data.
    """

    sampled: float | None
    greedy: float | None = None
    # role → its shares, if several roles are evaluated
    roles: dict[str, dict[str, float]] = field(default_factory=dict)
    # shares as sampled/NAME and greedy/NAME, if the data has several sources
    sources: dict[str, float] = field(default_factory=dict)
    # mean score of a flow's own evaluation, without missing scores; None if all are missing
    score: float | None = None
    # mean@n, pass@k and maj@k, if several answers are sampled
    repeated: dict[str, float] = field(default_factory=dict)
    sets: dict[str, dict[str, float]] = field(default_factory=dict)  # set given with --eval → its figures
    # set → role → its figures, if several roles are named
    set_roles: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)


@dataclass(frozen=True)
class HeldOutSet:
    """Prompts that the run doesn't train on, and the judge that scores answers to them."""

    prompts: Batch
    judge: HeldOutJudge
    name: str = ""  # name in --eval; "" for prompts held out from the data


KeepAnswers = Callable[[Mapping[str, Any]], object]  # called with the record of the answers to one prompt


def forget(answers: Mapping[str, Any]) -> None:
    """Ignore the answers: the default for ``keep``."""


@dataclass(frozen=True)
class Evaluation:
    """Measures the accuracy of one or more roles on held-out prompts."""

    queues: Queues
    engine: Engine
    role: str
    sets: tuple[HeldOutSet, ...]
    sampling: Sampling  # how to sample one or more answers per prompt
    others: tuple[Evaluation, ...] = ()  # the evaluations of other roles
    named: bool = False  # whether figures and answers name their role

    @property
    def held_out(self) -> int:
        """The number of prompts held out from the data."""
        return sum(len(each.prompts) for each in self.sets if not each.name)

    def only(self, names: Collection[str]) -> Evaluation:
        """Return an evaluation restricted to the sets in ``names``."""
        others = tuple(each.only(names) for each in self.others)
        return replace(self, sets=tuple(each for each in self.sets if each.name in names), others=others)

    def __call__(self, keep: KeepAnswers = forget) -> Accuracy:
        """Measure the accuracy of all evaluated roles. ``keep`` is called with the answers to each prompt."""
        return self.queues.do("model", partial(self._accuracy, keep))

    def _accuracy(self, keep: KeepAnswers) -> Accuracy:
        measured = {
            each.role: {held_out.name: each._figures(held_out, keep) for held_out in each.sets}
            for each in (self, *self.others)
        }
        own = measured[self.role].get("", {})
        roles = {role: sets[""] for role, sets in measured.items() if "" in sets} if self.named else {}
        sets = {
            each.name: {"prompts": float(len(each.prompts))} | measured[self.role][each.name]
            for each in self.sets
            if each.name
        }
        set_roles = (
            {name: {role: each[name] for role, each in measured.items()} for name in sets}
            if self.named
            else {}
        )
        sources = {name: value for name, value in own.items() if "/" in name}
        repeated = {name: value for name, value in own.items() if name not in ("sampled", "greedy", *sources)}
        return Accuracy(
            own.get("sampled"), own.get("greedy"), roles, sources, None, repeated, sets, set_roles
        )

    def answers(self, count: int) -> list[dict[str, str]]:
        """Return the first ``count`` held-out prompts, each with an answer sampled from the model.

        Each is a dict with the keys ``prompt`` and ``completion``, plus ``answer`` if the data has right
        answers.
        """
        return self.queues.do("model", partial(self._answers, count))

    def _answers(self, count: int) -> list[dict[str, str]]:
        prompts = self.sets[0].prompts
        rows = self._sampled(prompts.rows(range(min(count, len(prompts)))), 1.0, 1)
        names = [name for name in ("prompt", "answer", "completion") if name in rows]
        rows = self.engine.fetch(rows.select(*names))
        self.engine.finished()
        role = {"role": self.role} if self.named else {}
        return [
            role | dict(zip(names, values, strict=True))
            for values in zip(*(rows[name] for name in names), strict=True)
        ]

    def _figures(self, held_out: HeldOutSet, keep: KeepAnswers) -> dict[str, float]:
        """Return the shares of right answers in a set, sampled and greedy, plus ``NAME/SOURCE`` per source.

        If several answers are sampled per prompt, or if the set has a name, this includes mean@n, pass@k and
        maj@k.
        """
        prompts, samples = held_out.prompts, self.sampling.samples
        sampled: list[Answers] = []
        greedy: list[bool] = []
        for start in range(0, len(prompts), step := max(CHUNK // samples, 1)):
            part = prompts.rows(range(start, min(start + step, len(prompts))))
            draws, best = (
                self._judged(held_out.judge, part, temperature, count)
                for temperature, count in ((1.0, samples), (0.0, 1))
            )
            for record, several, one in zip(records(part), draws, best, strict=True):
                keep(
                    {
                        "set": held_out.name,
                        "role": self.role,
                        **record,
                        "seed": self.engine.seed,
                        "greedy": one.as_json()[0],
                        "sampled": several.as_json(),
                    }
                )
            sampled += [answers.judged for answers in draws]
            greedy += [answers.judged.right[0] for answers in best]
        shares: dict[str, Sequence[float]] = {
            "sampled": [sum(answers.right) / samples for answers in sampled],
            "greedy": greedy,
        }
        figures = {name: mean(right) for name, right in shares.items()}
        for name, right in shares.items():
            figures |= by_source(name, prompts[SOURCE] if SOURCE in prompts.data else (), right)
        return figures | (repeated_figures(sampled) if samples > 1 or held_out.name else {})

    def _judged(
        self, judge: HeldOutJudge, prompts: Batch, temperature: float, samples: int
    ) -> list[DrawnAnswers]:
        """Sample and score ``samples`` answers per prompt, and return them by prompt."""
        rows = self._sampled(prompts, temperature, samples)
        answered = (*prompts.columns, *SAMPLED, *(name for name in OF_EPISODES if name in rows))
        rows = self.engine.gather(rows.select(*answered, "tokens"))
        self.engine.finished()
        judgement = judge(rows.select(*answered))
        scores, texts, finish, lengths = (
            judgement.scores.tolist(),
            rows["completion"],
            rows["finish"],
            rows.data["tokens"].row_lengths,
        )
        tokens = lengths.tolist()
        return [
            DrawnAnswers(
                Answers(scores[first:last], judgement.extracted[first:last]),
                texts[first:last],
                finish[first:last],
                tokens[first:last],
            )
            for first in range(0, len(rows), samples)
            for last in (first + samples,)
        ]

    def _sampled(self, prompts: Batch, temperature: float, samples: int) -> Batch:
        """Sample rows for the prompts. The rows of a prompt are adjacent.

        The seed is the same in every evaluation.
        """
        sampling = replace(self.sampling, temperature=temperature, samples=samples)
        rows = self.engine.sample(
            self.role,
            self.engine.to_sample(self.role, prompts),
            sampling,
            derived(self.engine.seed, "evaluation"),
        )
        return Batch(rows.axis, prompts.carried(rows.axis) | rows.data)


@dataclass(frozen=True)
class DrawnAnswers:
    """The answers sampled for one prompt, with their scores."""

    judged: Answers
    completions: Sequence[str]
    finish: Sequence[str]  # why each answer ended
    tokens: Sequence[int]  # length of each answer

    def as_json(self) -> list[dict[str, Any]]:
        """Return the answers as a list of plain dicts."""
        rows = zip(
            self.completions, self.judged.scores, self.judged.extracted, self.finish, self.tokens, strict=True
        )
        return [
            {
                "completion": completion,
                "score": None if math.isnan(score) else score,
                "extracted": extracted,
                "truncated": finish == "length",
                "tokens": tokens,
            }
            for completion, score, extracted, finish, tokens in rows
        ]


def records(prompts: Batch) -> Iterator[dict[str, Any]]:
    """Yield a dict for each prompt with its source, its record's number, its text and the right answer.

    Keys for which there is no data are left out.
    """
    names = {"source": SOURCE, "record": "prompt_id", "prompt": "prompt", "answer": "answer"}
    columns = {
        name: values if isinstance(values := prompts[column], list) else values.tolist()
        for name, column in names.items()
        if column in prompts
    }
    return (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))


def mean(values: Sequence[float]) -> float:
    """Return the mean of a nonempty list."""
    return sum(values) / len(values)


def by_source(name: str, sources: Sequence[str], right: Sequence[float]) -> dict[str, float]:
    """Return the share of right answers in each source, under ``name/SOURCE``.

    ``sources``: the source of each answer, or empty if the data has only one. ``right``: 1 for each right
    answer and 0 for each wrong one.
    """
    hits: dict[str, list[float]] = {}
    for source, hit in zip(sources, right, strict=bool(sources)):
        hits.setdefault(source, []).append(hit)
    return {f"{name}/{source}": sum(each) / len(each) for source, each in hits.items()}


@dataclass(frozen=True)
class FlowEvaluation:
    """Runs a flow's own evaluation on held-out prompts, with the flow's rewards."""

    executor: Executor
    plan: Plan
    prompts: Batch

    @property
    def held_out(self) -> int:
        """The number of prompts held out from the data."""
        return len(self.prompts)

    def __call__(self, keep: KeepAnswers = forget) -> Accuracy:
        """Return the share of the evaluation's rows that score 1.0, and their mean score.

        The share is 0 if there are no rows. ``keep`` isn't called.
        """
        scores: list[float] = []
        sources: list[str] = []
        for start in range(0, len(self.prompts), PART):
            prompts = self.prompts.rows(range(start, min(start + PART, len(self.prompts))))
            rows = self._rows(prompts, ("scores",))
            scores += rows["scores"].double().tolist()
            index = prompts.axis.rows_of(rows.axis) if SOURCE in prompts else None
            sources += [prompts[SOURCE][row] for row in index.tolist()] if index is not None else []
        right, there = (
            [score == 1.0 for score in scores],
            [score for score in scores if not math.isnan(score)],
        )
        mean = sum(there) / len(there) if there else None
        return Accuracy(
            sum(right) / max(len(right), 1), sources=by_source("sampled", sources, right), score=mean
        )

    def answers(self, count: int) -> list[dict[str, str]]:
        """Return the first ``count`` held-out prompts, each with the evaluation's first completion for it.

        Each is a dict with the keys ``prompt`` and ``completion``, plus ``answer`` if the data has right
        answers. A missing completion is "".
        """
        prompts = self.prompts.rows(range(min(count, len(self.prompts))))
        rows = self._rows(prompts, ("completion",), first=True)
        completions = (
            dict(zip(rows.axis.keys[:, 0].tolist(), rows["completion"], strict=True))
            if "completion" in rows
            else {}
        )
        names = [name for name in ("prompt", "answer") if name in prompts]
        return [
            dict(zip(names, values, strict=True)) | {"completion": completions.get(position, "")}
            for position, *values in zip(
                prompts.axis.keys[:, 0].tolist(), *(prompts[name] for name in names), strict=True
            )
        ]

    def _rows(self, prompts: Batch, names: tuple[str, ...], first: bool = False) -> Batch:
        """Run the evaluation and return the named columns of its rows, as far as they exist.

        ``first``: only return each prompt's first row.
        """
        executor = self.executor.evaluating()
        try:
            rows = executor.run_body(self.plan, prompts, Outcome(), {})
            rows = rows.select(*(name for name in names if name in rows))
            positions = rows.axis.keys[:, 0].tolist()
            return executor.engine.fetch(
                rows.rows([positions.index(position) for position in dict.fromkeys(positions)])
                if first
                else rows
            )
        finally:
            executor.engine.finished()


def shown(accuracy: Accuracy) -> dict[Figure, float]:
    """Return an accuracy as metrics.

    These are the shares of the first role or of the flow's own evaluation, and the figures of each set given
    with ``--eval``. If there are several sources or several roles, their shares are included too.
    """
    plain = {
        "sampled": accuracy.sampled,
        "greedy": accuracy.greedy,
        "score": accuracy.score,
        **accuracy.repeated,
    }
    figures = {Figure(Of.EVALUATION, name): value for name, value in plain.items() if value is not None}
    for role, shares in {"": accuracy.sources, **accuracy.roles}.items():
        figures |= {of_source(name, role): share for name, share in shares.items()}
    figures |= {
        Figure(Of.SET, name, part=part): value
        for part, own in accuracy.sets.items()
        for name, value in own.items()
    }
    return figures | {
        Figure(Of.SET, name, role=role, part=part): value
        for part, roles in accuracy.set_roles.items()
        for role, own in roles.items()
        for name, value in own.items()
    }


def of_source(name: str, role: str = "") -> Figure:
    """Return the metric for a share with a name from ``by_source``, such as ``sampled/SOURCE``.

    Everything after the first slash is the source.
    """
    figure, _, source = name.partition("/")
    return Figure(Of.EVALUATION, figure, role=role, part=source)


def unvoted(accuracy: Accuracy) -> Iterator[str]:
    """Yield a message for each set of prompts that has a pass@k but no maj@k."""
    every = {
        "the prompts held out of the data": accuracy.repeated,
        **{f"the set '{name}'": each for name, each in accuracy.sets.items()},
    }
    for what, figures in every.items():
        if any(name.startswith("pass@") and name != "pass@1" for name in figures) and not any(
            name.startswith("maj@") for name in figures
        ):
            yield (
                f"no maj@k for {what}: its reward returns no extracted answers to vote with (the key "
                f"'{PRED}' in its result)"
            )
