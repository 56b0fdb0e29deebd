"""A scorer with a weight, bound to a pool of processes.

Several rewards are combined by a weighted sum, which is missing if any of the scores is. If a function
written for TRL returns None, it doesn't apply to the row, and the others are summed without it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rlflow.author.columns import CONVERSATION, MODEL_PROMPT, SOURCE, Kind, Level, field_column
from rlflow.author.words import column_meant
from rlflow.data.json_fields import names_of
from rlflow.data.scorer import Judged, ScorerSpec
from rlflow.errors import Place, PlanError, Reason, listed, nearest
from rlflow.extras import require
from rlflow.processes.sandbox import probe
from rlflow.rewards import plain, text
from rlflow.rewards.forms import OPENRLHF, TRL, Form
from rlflow.rewards.remote import RemoteReward
from rlflow.rewards.reward_pool import RewardPool
from rlflow.rewards.reward_spec import RewardSpec
from rlflow.rewards.scorers import BUILT_IN
from rlflow.rewards.values import NAN, NONE, NOT_HELD, OF_VALUES, Results

if TYPE_CHECKING:
    from torch import Tensor
    from torch import dtype as Dtype

    from rlflow.author.batch import Batch

READABLE = (Level.TEXT, Level.ROW, Level.GROUP)
OF_SUM = f"the weighted sum is a number {NOT_HELD}"
# project → the form of the prompt that its functions get, if a row has it
OF_FORMS = {OPENRLHF.project: (MODEL_PROMPT,), TRL.project: (CONVERSATION,)}
REST = ("prompt", "answer")  # columns that a function with **kwargs gets if the rows have them


@dataclass(frozen=True)
class Scores:
    """The scores that one reward gives to the rows of a batch."""

    values: Tensor  # float [rows]; NaN if the score is missing
    missing: Mapping[str, int] = field(default_factory=dict)  # cause → number of missing scores
    first: Mapping[str, Reason] = field(default_factory=dict)  # cause → reason of the first missing score
    # Key → further numbers of each row; NaN if a row has none.
    others: Mapping[str, Tensor] = field(default_factory=dict)
    # Bool [rows]: True where the reward does not apply to the row; None if it applies to all rows.
    inapplicable: Tensor | None = None


@dataclass(frozen=True)
class Sum:
    """The weighted sum of several rewards for the rows of a batch."""

    values: Tensor  # float64 [rows]; NaN if any score of the row is missing, or if no reward applies to it
    parts: Mapping[str, Scores]  # reward → its unweighted scores


@dataclass(frozen=True)
class Reward:
    """Scores rows in the processes of a pool."""

    name: str  # unique among the rewards of a run
    weight: float  # factor in the sum of several rewards
    scorer: ScorerSpec
    pool: RewardPool | RemoteReward
    timeout: float = 60.0  # seconds for each row; for a server, for each batch
    place: Place | None = None  # where the function is defined
    form: Form | None = None  # the other project's form, if the function has one

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of the row columns that the reward requires."""
        return self.scorer.reads

    @property
    def optional(self) -> tuple[str, ...]:
        """The names of the row columns that the reward uses only if a batch has them."""
        return self.scorer.optional

    def check(self, columns: Mapping[str, Kind]) -> None:
        """Check the columns that the reward reads. ``columns``: the kind of each available column, by name.

        Raises PlanError if a required column is missing, or if one that it reads doesn't have one value per
        row.
        """
        readable = [name for name, kind in columns.items() if kind.level in READABLE]
        for name in (*self.reads, *(name for name in self.optional if name in columns)):
            if field_column(name) in columns and name not in columns:
                continue
            if name not in columns:
                raise PlanError.of(
                    "reward-column",
                    f"the reward '{self.name}' reads '{name}', which the rows do not have",
                    found=listed(readable),
                    expected=f"a row column '{name}'",
                    nearest=column_meant(name, readable),
                    remedy="rename the parameter, give it a default, or map a field of the data: "
                    f"--data.{name} FIELD",
                )
            if name not in readable and not (name == "tokens" and self.form is TRL):
                raise PlanError.of(
                    "reward-column",
                    f"the reward '{self.name}' reads '{name}', which is not a row column",
                    found=str(columns[name]),
                    expected="text, or one number per row",
                    remedy="score tokens in a stage; rewards read rows",
                )

    def score(self, batch: Batch) -> Scores:
        """Score the rows of a batch, float32 [rows].

        Raises PlanError if a column is missing or the scorer can't be loaded.
        """
        import torch

        return self.scores(self.judged(self._submit(batch)), torch.float32)

    def judged(self, call: Any) -> Results:
        """Wait for a submitted call and return its results.

        For rows where a reward function didn't return a number, the message names the function's file and
        line.
        """
        results = self.pool.wait(call)
        for cause in OF_VALUES if self.place else ():
            if cause in results.first:
                results.first[cause] = f"{self.place}: {results.first[cause]}"
        return results

    def scores(self, results: Results, dtype: Dtype) -> Scores:
        """Return the results of a call as tensors. ``dtype``: dtype of the scores."""
        import torch

        inapplicable = None
        if self.form is TRL and results.none:
            inapplicable = torch.zeros(len(results.values), dtype=torch.bool)
            inapplicable[sorted(results.none)] = True
        return Scores(
            torch.tensor(results.values, dtype=dtype),
            dict(results.missing),
            results.first,
            {key: torch.tensor(numbers, dtype=dtype) for key, numbers in results.others.items()},
            inapplicable,
        )

    def _submit(self, batch: Batch) -> Any:
        self.check(batch.columns)
        names = [column for name in (*self.reads, *self.optional) if (column := _column(name, batch))]
        values = [_values(batch, _judged(name, self.scorer, batch)) for name in names]
        rows = list(zip(*values, strict=True)) if names else [()] * len(batch)
        return self.pool.submit(self.scorer, names, rows, self.timeout)


def _judged(name: str, scorer: ScorerSpec, batch: Batch) -> str:
    """Return the column to use for a scorer's parameter ``name``.

    In episodes, rlflow's own scorers read the model's last turn, not the whole completion.
    """
    return "said" if name == "completion" and scorer.kind in BUILT_IN and "said" in batch else name


def _column(name: str, batch: Batch) -> str | None:
    """Return the batch column for a parameter: its column, or else its data field, or None without either."""
    return next((column for column in (name, field_column(name)) if column in batch), None)


def _values(batch: Batch, name: str) -> list[Any]:
    """Return a column as a list with one value per row. For a token column, that's a list of numbers."""
    if name in batch and batch.data[name].ragged:
        return batch.data[name].lists()
    column = batch[name]
    return column if isinstance(column, list) else list(column.tolist())


def score_all(rewards: Sequence[Reward], batch: Batch, dtype: Dtype) -> Sum:
    """Score a batch with several rewards in parallel, and return their weighted sum as float64.

    A row's sum is NaN if any of its scores is missing. ``dtype``: dtype of each reward's scores.
    """
    return sum_up(submit_all(rewards, batch), len(batch), dtype)


def submit_all(rewards: Sequence[Reward], batch: Batch) -> list[tuple[Reward, Any]]:
    """Submit a batch to several rewards, which score it in parallel.

    Returns (reward, call) for each reward, to pass to ``sum_up``.
    """
    return [(reward, reward._submit(batch)) for reward in rewards]


def sum_up(calls: Sequence[tuple[Reward, Any]], rows: int, dtype: Dtype, alone: bool = True) -> Sum:
    """Wait for all calls of a batch, and return the weighted sum of their rewards as float64.

    ``calls``: what ``submit_all`` returned. ``rows``: the number of rows in the batch. ``dtype``: dtype of
    each reward's scores. ``alone``: True if the rows have no other rewards. If False, rows to which none of
    these rewards applies get the sum 0.
    """
    import torch

    parts = {reward.name: reward.scores(reward.judged(call), dtype) for reward, call in calls}
    weights = {reward.name: reward.weight for reward, _ in calls}
    total = torch.zeros(rows, dtype=torch.float64)
    nowhere = torch.full((rows,), alone)
    for name, part in parts.items():
        out = torch.zeros(rows, dtype=torch.bool) if part.inapplicable is None else part.inapplicable
        total += weights[name] * part.values.double().masked_fill(out, 0.0)
        nowhere &= out
    total[nowhere] = NAN
    return Sum(total, {name: _without_inapplicable(part, int(nowhere.sum())) for name, part in parts.items()})


def _without_inapplicable(part: Scores, nowhere: int) -> Scores:
    """Return a reward's scores, counting None as missing only for rows to which no reward applies.

    ``nowhere``: the number of such rows.
    """
    if part.inapplicable is None:
        return part
    others = {cause: count for cause, count in part.missing.items() if cause != NONE}
    return replace(part, missing={**others, NONE: nowhere} if nowhere else others)


def held(total: Tensor, dtype: Dtype) -> tuple[Tensor, int]:
    """Convert sums from float64 to ``dtype``, and return (sums, number of overflows).

    Sums too large for ``dtype`` become NaN.
    """
    out = total.to(dtype)
    lost = out.isinf()
    return out.masked_fill(lost, NAN), int(lost.sum())


def same_fields(reward: Reward, source: str, own: Mapping[str, Kind], every: Mapping[str, Kind]) -> None:
    """Raise PlanError if a reward reads a column that ``source`` lacks but other data sources have.

    ``own``: columns of ``source``. ``every``: columns of all sources.
    """
    for name in reward.reads:
        if not {name, field_column(name)} & own.keys() and {name, field_column(name)} & every.keys():
            raise PlanError.of(
                "source-field",
                f"the reward '{reward.name}' reads '{name}', which the source '{source}' does not have",
                found=listed(column for column in own if column != SOURCE),
                expected=f"a field '{name}' in '{source}' too",
                nearest=nearest(name, [*own, *names_of(own)]),
                remedy=f"map it: --data.{source}.{name} FIELD, or a reward for each source: --reward "
                f"REWARD@{source}",
            )


def bind(
    specs: Sequence[RewardSpec],
    pool: RewardPool,
    data: Judged | None = None,
    timeout: float = 60.0,
    unsafe: bool = False,
) -> list[Reward]:
    """Bind rewards to a pool. The returned rewards have unique names and can score rows.

    ``data``: the data set, which provides the scorer of the reward ``task``. ``timeout``: seconds for each
    row. ``unsafe``: True to allow scorers that evaluate text as code on a machine that can't isolate them.
    Raises PlanError if the data set has no scorer, or if the scorer can't be isolated. Raises ValueError for
    a reward model, which must be bound as a role.
    """
    names = Counter[str]()
    rewards = []
    for spec in specs:
        names[spec.name] += 1
        name = spec.name if names[spec.name] == 1 else f"{spec.name}_{names[spec.name]}"
        judge = pool.remote(spec.path) if spec.kind == "remote" else pool
        columns = text.reads(spec.path, spec.function) if spec.kind == "function" else None
        place, form = (columns.place, columns.form) if columns else (None, None)
        rewards.append(Reward(name, spec.weight, _scorer(spec, data, unsafe), judge, timeout, place, form))
    return rewards


def _scorer(spec: RewardSpec, data: Judged | None, unsafe: bool) -> ScorerSpec:
    match spec.kind:
        case "math":
            require("math_verify", extra="tasks")
            return ScorerSpec("math")
        case "function":
            columns = text.reads(spec.path, spec.function)
            settings: dict[str, Any] = {
                "file": spec.path,
                "function": spec.function,
                "source": text.source(spec.path),
                "module": spec.module,
                **({"later": True} if columns.later else {}),
                **({"form": columns.form.project} if columns.form else {}),
            }
            rest = (*REST, *names_of(data.columns if data else ())) if columns.rest else ()
            optional = tuple(
                dict.fromkeys(name for name in (*columns.optional, *rest) if name not in columns.required)
            )
            optional += OF_FORMS.get(columns.form.project, ()) if columns.form else ()
            return ScorerSpec("function", _required(columns.required, columns.form, data), optional, settings)
        case "remote":
            return ScorerSpec("remote", _required(OPENRLHF.reads, OPENRLHF, data), OF_FORMS[OPENRLHF.project])
        case "task":
            return _task(data, unsafe)
    raise ValueError(f"the reward '{spec.name}' is not scored from text: bind it as a role")


def _required(names: tuple[str, ...], form: Form | None, data: Judged | None) -> tuple[str, ...]:
    """Return the columns that a reward requires.

    If the data has the ground-truth field of ``form``, it takes the place of the column ``answer``.
    """
    if form is None or data is None or not form.truth or field_column(form.truth) not in data.columns:
        return names
    return tuple(form.truth if name == "answer" else name for name in names)


def _task(data: Judged | None, unsafe: bool) -> ScorerSpec:
    if data is None or data.scorer is None:
        raise PlanError.of(
            "reward-task",
            "the data have neither a scorer of their own nor an answer to compare with",
            found=listed(data.columns) if data else "no data",
            expected="a column 'answer', or a reasoning-gym task",
            remedy="name a reward: --reward file.py:function, or map the field: --data.answer FIELD",
        )
    if data.scorer.kind == "reasoning_gym" and plain.evaluates(data.scorer.settings["task"]) and not unsafe:
        _must_be_isolated(data.scorer.settings["task"])
    return data.scorer


def _must_be_isolated(task: str) -> None:
    """Raise PlanError if the scorer of ``task`` evaluates text as code and this machine can't isolate it."""
    if lacks := probe.missing():
        raise PlanError.of(
            "scorer-unsafe",
            f"the scorer of '{task}' evaluates text written by models, and cannot be isolated here",
            found=f"the sandbox cannot restrict {listed(lacks)}",
            expected="all entries that rlflow doctor lists under isolation",
            remedy="use another task, a newer Linux, or --unsafe-scorers true: it still evaluates only "
            "plain answers",
        )
