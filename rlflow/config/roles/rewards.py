"""Bind rewards to reward roles. Rows are scored by reward processes or by a model's forward pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlflow.author.batch import Batch
from rlflow.author.columns import SOURCE, field_column
from rlflow.author.figures import Cause, Figure, Of
from rlflow.author.flow import Flow
from rlflow.author.methods import MODEL_READS
from rlflow.compiler.trace.arguments import role_names
from rlflow.config.flags import RunConfig
from rlflow.config.options import Options
from rlflow.config.roles.backends import backend, numbers
from rlflow.config.roles.bound import side_class
from rlflow.config.roles.environments import default_rewards, environments_of
from rlflow.config.roles.judging import HeldOutJudge, check_judge, no_judge
from rlflow.data.data_spec import parse_sources
from rlflow.data.json_fields import Wanted
from rlflow.data.scorer import Judged
from rlflow.errors import PlanError, Reason
from rlflow.execution.engine import Engine, Scorer
from rlflow.execution.tally import Label, PartialMetric, PartialMetrics, merged
from rlflow.processes.clients import outages
from rlflow.rewards.confinement import Confinement
from rlflow.rewards.reward import OF_SUM, Reward, Scores, bind, held, same_fields, submit_all, sum_up
from rlflow.rewards.reward_pool import RewardPool
from rlflow.rewards.reward_spec import RewardSpec, check_sources, parse_reward, wanted
from rlflow.rewards.text import reads
from rlflow.rewards.vocabulary import check_same
from rlflow.rewards.worker_pool import OnOutput
from rlflow.training.protocols import ModelSpec, Trainer


@dataclass
class ModelReward:
    """A frozen reward model with a score head, loaded from a folder of its own."""

    spec: RewardSpec
    trainer: Trainer | None = None

    def load(self, device: str, options: Options) -> None:
        """Load the model with the trainer class of the run's backend."""
        kind = side_class(options.backend, "trainer")
        self.trainer = kind(
            ModelSpec(
                Path(self.spec.path),
                "scores",
                False,
                device,
                options.dtype,
                options.seed,
                longest=options.longest_row,
            ),
            kind.Settings(),
        )

    def __call__(self, batch: Batch) -> Tensor:
        """Return the model's score of each row."""
        assert self.trainer is not None
        return torch.as_tensor(self.trainer.forward(batch, ("scores",))["scores"])


@dataclass
class EpisodeReward:
    """A reward that is the score the environment gave to the row's episode."""

    spec: RewardSpec

    def load(self, device: str, options: Options) -> None:
        """Do nothing; there is no model to load."""

    def __call__(self, batch: Batch) -> Tensor:
        """Return the score that each row's environment gave it."""
        return torch.as_tensor(batch["episode_score"])


@dataclass(frozen=True)
class Asked:
    """A batch that has been submitted to reward functions, with the calls that will return its scores."""

    batch: Batch
    calls: list[tuple[Reward, Any]]


@dataclass
class Weighted:
    """The weighted sum of a role's rewards, in ``dtype``.

    If any of a row's scores is missing, so is the sum. A reward that doesn't apply to a row counts as 0.
    """

    dtype: torch.dtype
    functions: list[Reward]
    models: list[ModelReward | EpisodeReward] = field(default_factory=list)
    reasons: dict[Cause, Reason] = field(default_factory=dict)

    def __call__(self, batch: Batch) -> tuple[Tensor, PartialMetrics]:
        """Return (weighted sum of scores for each row, metrics)."""
        return self.answer(self.ask(batch))

    def ask(self, batch: Batch) -> Asked:
        """Submit rows to the processes of reward functions without waiting for the scores."""
        return Asked(batch, submit_all(self.functions, batch))

    def answer(self, asked: Asked) -> tuple[Tensor, PartialMetrics]:
        """Wait for submitted rows, and return (weighted sum of scores for each row, metrics)."""
        batch = asked.batch
        total = torch.zeros(len(batch), dtype=torch.float64)
        metrics: dict[Label, PartialMetric] = {}
        if self.functions:
            scores = sum_up(asked.calls, len(batch), self.dtype, alone=not self.models)
            total += scores.values
            for name, part in scores.parts.items():
                metrics |= self._of_part(name, part, len(scores.parts) + len(self.models) > 1)
        for model in self.models:
            given = model(batch)
            total += model.spec.weight * given.double()
            metrics[Figure(Of.REWARD, "mean", part=model.spec.name)] = PartialMetric.of(given)
        sums, lost = held(total, self.dtype)
        if lost:
            names = [*(reward.name for reward in self.functions), *(model.spec.name for model in self.models)]
            cause = Cause("overflow", "+".join(names))
            metrics = merged(
                [metrics, {Figure(Of.MISSING, cause.name, part=cause.reward): PartialMetric.sum(lost)}]
            )
            self.reasons.setdefault(cause, OF_SUM)
        return sums, metrics

    def _of_part(self, reward: str, scores: Scores, several: bool) -> dict[Label, PartialMetric]:
        """Return the metrics of one reward.

        ``several``: whether the role has other rewards too, in which case this one's mean is included.
        """
        self.reasons.update({Cause(cause, reward): reason for cause, reason in scores.first.items()})
        metrics: dict[Label, PartialMetric] = {
            Figure(Of.MISSING, cause, part=reward): PartialMetric.sum(count)
            for cause, count in scores.missing.items()
        }
        metrics |= {
            Figure(Of.LOGGED, key, part=reward): PartialMetric.of(numbers)
            for key, numbers in scores.others.items()
        }
        return metrics | (
            {Figure(Of.REWARD, "mean", part=reward): PartialMetric.of(scores.values)} if several else {}
        )


@dataclass
class BySource:
    """Scores each row with the weighted sum of rewards for its data source."""

    dtype: torch.dtype
    sums: Mapping[str, Weighted]  # by the source's name

    def __call__(self, batch: Batch) -> tuple[Tensor, PartialMetrics]:
        """Return (score of each row, metrics)."""
        total = torch.full((len(batch),), torch.nan, dtype=self.dtype)
        names = batch[SOURCE]
        rows = {
            name: torch.tensor([row for row, source in enumerate(names) if source == name])
            for name in dict.fromkeys(names)
        }
        # submit the rows of all sources before waiting
        asked = {name: self.sums[name].ask(batch.rows(index)) for name, index in rows.items()}
        metrics: list[PartialMetrics] = []
        for name, index in rows.items():
            scores, numbers = self.sums[name].answer(asked[name])
            total[index] = scores
            metrics.append(numbers)
        return total, merged(metrics)

    @property
    def reasons(self) -> dict[Cause, Reason]:
        """The first reason seen for each cause of missing scores."""
        return {cause: reason for each in self.sums.values() for cause, reason in each.reasons.items()}


@dataclass
class ModelScore:
    """The scorer of a reward role that the run trains itself, using the role's model."""

    engine: Engine
    role: str

    def __call__(self, batch: Batch) -> tuple[Tensor, PartialMetrics]:
        """Return (the model's score for each row, empty metrics)."""
        return torch.as_tensor(self.engine.forward(self.role, ("scores",), batch)["scores"]), {}


@dataclass(frozen=True)
class RewardNames:
    """The rewards of each role, as given by flags."""

    named: tuple[RewardSpec, ...] = ()  # from --reward, in that order; default: the data's scorer
    own: Mapping[str, RewardSpec] = field(default_factory=dict)  # role → its own reward (--ROLE.reward)
    sources: tuple[str, ...] = ()  # names of the sources of data
    # held-out set given with --eval → the reward for this set only
    judges: Mapping[str, RewardSpec] = field(default_factory=dict)
    made_up: bool = False  # the null backend makes up scores, without any reward
    # role of ``*rewards`` → its position in ``named``
    places: Mapping[str, int] = field(default_factory=dict)

    @staticmethod
    def of(config: RunConfig, flow: Flow) -> RewardNames:
        """Return the rewards of a flow's roles, as given in the configuration.

        Raises PlanError for a reward or source that doesn't exist, or a source that has no reward.
        """
        sources = tuple(source.name for source in parse_sources(config.options.data))
        judges = _judges(config.judges)
        if config.has_synthetic_scores:
            return RewardNames(made_up=True)
        own = {
            role: parse_reward(str(values["reward"]))
            for role, values in config.roles.items()
            if values.get("reward")
        }
        every = default_rewards(config.options.reward, environments_of(config.environments))
        several = role_names(flow, len(every)).get(flow.parameters.rest or "", []) if len(every) > 1 else []
        places = {role: place for place, role in enumerate(several)}
        names = RewardNames(tuple(map(parse_reward, every)), own, sources, judges, places=places)
        for rewards in (names.named, *((reward,) for reward in own.values())):
            check_sources(rewards, sources)
        return names

    def of_role(self, role: str) -> tuple[RewardSpec, ...]:
        """Return a role's rewards: --ROLE.reward if it is given, else all rewards.

        A role of ``*rewards`` has a single reward, the one at its position.
        """
        if role in self.own:
            return (self.own[role],)
        return (self.named[self.places[role]],) if role in self.places else self.named

    def wanted(self, source: str) -> Wanted:
        """Return the data fields that the reward functions for a data source may read."""
        return wanted(spec for spec in (*self.named, *self.own.values()) if spec.source in ("", source))

    def wanted_of_set(self, name: str) -> Wanted:
        """Return the data fields that the reward for a held-out set may read.

        If the set has a reward of its own, the fields that this reward requires are required. Otherwise, all
        fields are optional.
        """
        if name in self.judges:
            return wanted([self.judges[name]])
        maybe = wanted(spec for spec in self.named if not spec.source)
        return dataclasses.replace(maybe, names=dict.fromkeys(maybe.names, False))

    def forms(self) -> Iterator[str]:
        """Yield a line about each reward function from another project, saying how it is called."""
        for spec in dict.fromkeys([*self.named, *self.own.values(), *self.judges.values()]):
            form = reads(spec.path, spec.function).form if spec.kind == "function" else None
            if form:
                parameters = ", ".join([*form.parameters, *(["a list per column"] if form.columns else [])])
                yield f"reward {spec.name} is called in the way of {form.project}: {spec.function}({parameters})"

    def functions_only(self, role: str) -> bool:
        """Whether none of a role's rewards comes from a model or an environment."""
        return all(spec.judges_text for spec in ([self.own[role]] if role in self.own else self.named))


def unweighted(role: str, specs: Iterable[RewardSpec], own: bool) -> tuple[RewardSpec, ...]:
    """Return a role's rewards without weights, for a flow that weights its rewards itself.

    ``own``: whether they come from --ROLE.reward. The flow can't see the weight of such a reward, so
    PlanError is raised if it has one.
    """
    if own and (weight := next((spec.weight for spec in specs if spec.weight != 1), None)) is not None:
        raise PlanError.of(
            "reward-weight",
            f"the flow weighs its rewards itself, and cannot see the weight of --{role}.reward",
            found=str(weight),
            expected="the weight at the --reward in the same position",
            remedy="--reward REWARD:WEIGHT for each reward",
        )
    return tuple(dataclasses.replace(spec, weight=1.0) for spec in specs)


def _judges(written: Iterable[str]) -> dict[str, RewardSpec]:
    """Return the reward for each held-out set that has one, by the set's name.

    Raises PlanError if a set has two rewards or its reward is a model.
    """
    judges: dict[str, RewardSpec] = {}
    for spec in map(parse_reward, written):
        if not spec.judges_text or spec.source in judges:
            second = f", and {judges[spec.source].name} too" if spec.source in judges else ""
            raise PlanError.of(
                "eval-reward",
                f"the held-out set '{spec.source}' needs exactly one correctness reward",
                found=f"{'the reward model ' * (spec.kind == 'model')}{spec.name}{second}",
                expected="one reward: task, math, a function or a server",
                remedy=f"--reward math@{spec.source}, or --reward FILE.py:function@{spec.source}",
            )
        judges[spec.source] = dataclasses.replace(spec, weight=1.0)
    return judges


class Rewards:
    """A run's rewards. Reward functions share a pool of processes until ``close`` is called."""

    def __init__(self, names: RewardNames, data: Judged, options: Options, tokenizer: str | None) -> None:
        """Bind the named rewards to the data.

        ``tokenizer``: the folder of the tokenizer that encodes the data. Reward models must use the same one.
        """
        self.names, self._data, self._options, self._tokenizer = names, data, options, tokenizer
        allowed = Confinement(
            options.reward_env, options.reward_write, options.reward_network, options.reward_memory
        )
        self._pool = RewardPool(options.reward_workers, allowed, outages.clock)
        self._dtype = numbers(options.dtype)
        self._models: dict[str, list[ModelReward | EpisodeReward]] = {}
        self._bound: list[Weighted | BySource] = []
        self._null: Scorer | None = backend("null").Score() if names.made_up else None

    @property
    def reads(self) -> tuple[str, ...]:
        """The columns that reward roles read, given these rewards and this data."""
        if self._null:
            return ()
        functions = [spec for spec in self.names.named if spec.judges_text]
        bound = [
            reward
            for source, data in self._sources.items()
            if self._judged(data)
            for reward in self._bind(functions, source)
        ]
        known = self._data.columns
        columns = [
            name
            for reward in bound
            for name in (
                *reward.reads,
                *(n for n in reward.optional if n in known or field_column(n) in known),
            )
        ]
        models = MODEL_READS if any(spec.kind == "model" for spec in self.names.named) else ()
        scored = ("episode_score",) if any(spec.kind == "env" for spec in self.names.named) else ()
        source = (SOURCE,) if self._data.sources else ()
        return tuple(dict.fromkeys((*columns, *models, *scored, *source)))

    @property
    def _sources(self) -> Mapping[str, Judged]:
        """The data sources by name. If there is only one, its name is ""."""
        return self._data.sources or {"": self._data}

    def _judged(self, data: Judged) -> bool:
        """Whether ``data`` can be scored, because rewards are named or the data has its own scorer."""
        return bool(self._options.reward) or data.scorer is not None

    def _bind(self, specs: Iterable[RewardSpec], source: str) -> list[Reward]:
        """Return the rewards for the rows of a source.

        Raises PlanError if one of them reads columns that only other sources have.
        """
        own = [spec for spec in specs if not source or spec.source in ("", source)]
        bound = bind(
            own, self._pool, self._sources[source], self._options.reward_timeout, self._options.unsafe_scorers
        )
        for reward in bound if source else ():
            same_fields(reward, source, self._sources[source].columns, self._data.columns)
        return bound

    def _by_source(
        self, specs: Iterable[RewardSpec], models: Iterable[ModelReward | EpisodeReward] = ()
    ) -> Weighted | BySource:
        """Return a scorer that sums the rewards for each source separately."""
        specs, models = list(specs), list(models)
        sums = {
            source: Weighted(
                self._dtype,
                self._bind(specs, source),
                [model for model in models if not source or model.spec.source in ("", source)],
            )
            for source in self._sources
        }
        return BySource(self._dtype, sums) if self._data.sources else sums[""]

    def scorer(self, role: str, weighed: Collection[str] = ()) -> Scorer:
        """Return the scorer for a reward role's rows.

        It uses the role's own reward (--ROLE.reward) if there is one, else all rewards. For a role of
        ``*rewards``, it uses the reward at the role's position. ``weighed``: roles whose rewards the flow
        weights itself, so their scores aren't multiplied by a weight here.
        """
        if self._null:
            return self._null
        specs = self.names.of_role(role)
        if role in weighed:
            specs = unweighted(role, specs, role in self.names.own)
        check_sources(specs, self.names.sources)
        models = [
            EpisodeReward(spec) if spec.kind == "env" else ModelReward(spec)
            for spec in specs
            if not spec.judges_text
        ]
        for model in models if self._tokenizer else ():
            if model.spec.kind == "model":
                check_same(Path(model.spec.path), Path(self._tokenizer or ""))
        self._models[role] = models
        self._bound.append(self._by_source((spec for spec in specs if spec.judges_text), models))
        return self._bound[-1]

    def reasons(self) -> dict[Cause, Reason]:
        """Return the first reason seen for each cause of missing scores."""
        return {cause: reason for scorer in self._bound for cause, reason in scorer.reasons.items()}

    def judge(self) -> HeldOutJudge | None:
        """Return the judge for answers to held-out prompts, or None if some data source doesn't have one.

        Each source has its own judge. It is the reward ``math``, ``task`` or ``env`` if one is named, else
        the data's own scorer, else the first reward that is a function or a server. Custom rewards come last
        because they may measure something other than correctness, such as style.
        """
        chosen = [self._judge(source, data) for source, data in self._sources.items()]
        if any(spec is not None and spec.kind == "env" for spec in chosen):
            return HeldOutJudge(self._dtype, {})
        judges = {
            source: dataclasses.replace(spec, weight=1.0, source=source)
            for spec, source in zip(chosen, self._sources, strict=True)
            if spec
        }
        if len(judges) < len(chosen):
            return None
        return HeldOutJudge.of(
            self._dtype, {source: self._bind([spec], source)[0] for source, spec in judges.items()}
        )

    def judge_of_set(self, name: str, data: Judged) -> HeldOutJudge:
        """Return the judge for a held-out set given with ``--eval``.

        It is the reward named for this set. If there is none, it is chosen as in ``judge``, from the rewards
        without a source. Raises PlanError if no reward fits, or if the judge reads a column that the set
        doesn't have.
        """
        unsourced = tuple(spec for spec in self.names.named if not spec.source)
        spec = self.names.judges.get(name) or _chosen(unsourced, data)
        if spec is None:
            raise no_judge(name, unsourced)
        if spec.kind == "env":
            return HeldOutJudge(self._dtype, {})
        spec = dataclasses.replace(spec, weight=1.0, source="")
        (reward,) = bind([spec], self._pool, data, self._options.reward_timeout, self._options.unsafe_scorers)
        check_judge(reward, name, data)
        return HeldOutJudge.of(self._dtype, {"": reward})

    def _judge(self, source: str, data: Judged) -> RewardSpec | None:
        return _chosen([spec for spec in self.names.named if not source or spec.source in ("", source)], data)

    def load_models(self, device: str, options: Options, roles: Collection[str] | None = None) -> None:
        """Load the reward models of ``roles``, or of all roles if it is None.

        ``options``: the run's options, with the length of the longest row filled in.
        """
        for role, models in self._models.items():
            for model in models if roles is None or role in roles else ():
                model.load(device, options)

    def on_output(self, on_output: OnOutput) -> None:
        """Call ``on_output`` with everything that rewards print from now on. Several threads call it."""
        self._pool.on_output = on_output

    def close(self) -> None:
        """Stop the processes of reward functions."""
        self._pool.close()


def _chosen(specs: Iterable[RewardSpec], data: Judged) -> RewardSpec | None:
    """Return the reward that checks correctness, or None.

    In order of preference, it is math, task or env if named, the data's own scorer, or the first function or
    server.
    """
    specs = list(specs)
    named = [spec for spec in specs if spec.kind == "math" or (spec.kind == "task" and data.scorer)]
    named += [spec for spec in specs if spec.kind == "env"]
    own = [parse_reward("task")] if data.scorer else []
    functions = [spec for spec in specs if spec.kind in ("function", "remote")]
    return next(iter([*named, *own, *functions]), None)
