"""Rewards bound to reward roles: what judges a run's rows, in processes of its own or by a model's forward."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from rlflow.author.verbs import MODEL_READS
from rlflow.batch import Batch
from rlflow.binding.backends import backend, numbers
from rlflow.binding.roles import half_class
from rlflow.columns import field_column
from rlflow.config.flags import RunConfig
from rlflow.config.options import Options
from rlflow.data.json_fields import Wanted
from rlflow.data.scorer import Judged
from rlflow.execution.engine import Engine, Scorer
from rlflow.execution.tally import PartialMetric, PartialMetrics
from rlflow.rewards.confinement import Confinement
from rlflow.rewards.pool import RewardPool
from rlflow.rewards.process import Hear
from rlflow.rewards.reward import Reward, bind, score_all
from rlflow.rewards.spec import RewardSpec, parse_reward, wanted
from rlflow.rewards.text import reads
from rlflow.rewards.vocabulary import check_same
from rlflow.training.protocols import ModelSpec, Trainer


@dataclass
class ModelReward:
    """A reward model of its own folder: frozen, score head."""

    spec: RewardSpec
    trainer: Trainer | None = None

    def load(self, device: str, options: Options) -> None:
        """Load the model with a trainer of the run's backend."""
        kind = half_class(options.backend, "trainer")
        self.trainer = kind(ModelSpec(Path(self.spec.path), "scores", False, device, options.dtype, options.seed), kind.Settings())

    def __call__(self, batch: Batch) -> Tensor:
        assert self.trainer is not None
        return torch.as_tensor(self.trainer.forward(batch, ("scores",))["scores"])


@dataclass
class Weighted:
    """The weighted sum of rewards on one role, in ``dtype``; missing in one is missing in the sum."""

    dtype: torch.dtype
    functions: list[Reward]
    models: list[ModelReward] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)

    def __call__(self, batch: Batch) -> tuple[Tensor, PartialMetrics]:
        total = torch.zeros(len(batch), dtype=torch.float64)
        metrics: dict[str, PartialMetric] = {}
        if self.functions:
            scores = score_all(self.functions, batch, self.dtype)
            total += scores.values.double()
            self.reasons.update(scores.first)
            metrics |= {f"missing_{cause}": PartialMetric.sum(count) for cause, count in scores.missing.items()}
            metrics |= {name: PartialMetric.of(numbers) for name, numbers in scores.others.items()}
            if len(scores.parts) + len(self.models) > 1:
                metrics |= {f"{name}_mean": PartialMetric.of(part) for name, part in scores.parts.items()}
        for model in self.models:
            part = model(batch)
            total += model.spec.weight * part.double()
            metrics[f"{model.spec.name}_mean"] = PartialMetric.of(part)
        return total.to(self.dtype), metrics


@dataclass
class ModelScore:
    """A reward role that the run itself trains: its model's scores."""

    engine: Engine
    role: str

    def __call__(self, batch: Batch) -> tuple[Tensor, PartialMetrics]:
        return torch.as_tensor(self.engine.forward(self.role, ("scores",), batch)["scores"]), {}


@dataclass(frozen=True)
class RewardNames:
    """The rewards that judge each role, as flags name them."""

    named: tuple[RewardSpec, ...] = ()  # of --reward, in its order; the data's own scorer where none is named
    own: Mapping[str, RewardSpec] = field(default_factory=dict)  # role → its own (--ROLE.reward)
    made_up: bool = False  # whether scores are the null backend's own, and nothing judges

    @staticmethod
    def of(config: RunConfig) -> RewardNames:
        """Read the names of rewards. Raises PlanError for a reward that is not there."""
        if config.judged_by_nothing:
            return RewardNames(made_up=True)
        own = {role: parse_reward(str(values["reward"])) for role, values in config.roles.items() if values.get("reward")}
        return RewardNames(tuple(map(parse_reward, config.options.reward or ("task",))), own)

    def of_role(self, role: str) -> tuple[RewardSpec, ...]:
        """The rewards of a role: its own, of those for all of ``*rewards`` the one in its place, or all of them."""
        if role in self.own:
            return (self.own[role],)
        number = role.rpartition("_")[2]
        return (self.named[int(number)],) if number.isdigit() and len(self.named) > 1 else self.named

    def wanted(self) -> Wanted:
        """The fields of the data that functions among the rewards may ask for."""
        return wanted([*self.named, *self.own.values()])

    def forms(self) -> Iterator[str]:
        """A line for each reward function that has the form of another project."""
        for spec in dict.fromkeys([*self.named, *self.own.values()]):
            form = reads(spec.path, spec.function).form if spec.kind == "function" else None
            if form:
                yield f"reward {spec.name} is called as {form.project} calls it: {spec.function}({', '.join(form.parameters)})"

    def functions_only(self, role: str) -> bool:
        """Whether no model is among the rewards that may judge for a role."""
        return all(spec.kind != "model" for spec in ([self.own[role]] if role in self.own else self.named))


class Rewards:
    """The rewards of a run. Functions share a pool of processes, which ``close`` ends."""

    def __init__(self, names: RewardNames, data: Judged, options: Options, tokenizer: str | None) -> None:
        """``tokenizer``: the folder whose tokenizer encodes the data, which reward models must share."""
        self.names, self._data, self._options, self._tokenizer = names, data, options, tokenizer
        allowed = Confinement(options.reward_env, options.reward_write, options.reward_network, options.reward_memory)
        self._pool = RewardPool(options.reward_workers, allowed)
        self._dtype = numbers(options.dtype)
        self._models: dict[str, list[ModelReward]] = {}
        self._bound: list[Weighted] = []
        self._null: Scorer | None = backend("null").Score() if names.made_up else None

    @property
    def reads(self) -> tuple[str, ...]:
        """The columns that reward roles read at these settings."""
        if self._null:
            return ()
        functions = [spec for spec in self.names.named if spec.kind != "model"]
        bound = self._bind(functions) if self._judged else []
        known = self._data.columns
        columns = [name for reward in bound
                   for name in (*reward.reads, *(n for n in reward.optional if n in known or field_column(n) in known))]
        models = MODEL_READS if len(functions) < len(self.names.named) else ()
        return tuple(dict.fromkeys((*columns, *models)))

    @property
    def _judged(self) -> bool:
        """Whether the default, the data's own scorer, can judge; a flow without rewards needs none."""
        return bool(self._options.reward) or self._data.scorer is not None

    def _bind(self, specs: Iterable[RewardSpec]) -> list[Reward]:
        return bind(list(specs), self._pool, self._data, self._options.reward_timeout, self._options.unsafe_scorers)

    def scorer(self, role: str) -> Scorer:
        """The scorer of a reward role's rows: all rewards, its own (--ROLE.reward), or of ``*rewards`` the one in its place."""
        if self._null:
            return self._null
        specs = self.names.of_role(role)
        models = [ModelReward(spec) for spec in specs if spec.kind == "model"]
        for model in models if self._tokenizer else ():
            check_same(Path(model.spec.path), Path(self._tokenizer or ""))
        self._models[role] = models
        self._bound.append(Weighted(self._dtype, self._bind(spec for spec in specs if spec.kind != "model"), models))
        return self._bound[-1]

    def reasons(self) -> dict[str, str]:
        """The first message of each cause for which scores were missing."""
        return {cause: message for scorer in self._bound for cause, message in scorer.reasons.items()}

    def judge(self) -> Scorer | None:
        """The scorer that says whether a held-out answer is right, at weight 1: the reward ``math`` or ``task`` where it is named, else the
        data's own scorer, else the first reward that is a function. A reward for style or length does not tell right from wrong."""
        named = [spec for spec in self.names.named if spec.kind == "math" or (spec.kind == "task" and self._data.scorer)]
        own = [parse_reward("task")] if self._data.scorer else []
        functions = [spec for spec in self.names.named if spec.kind == "function"]
        chosen = next(iter([*named, *own, *functions]), None)
        return Weighted(self._dtype, self._bind([dataclasses.replace(chosen, weight=1.0)])) if chosen else None

    def load_models(self, device: str, roles: Collection[str] | None = None) -> None:
        """Load the reward models of some roles, or of all."""
        for role, models in self._models.items():
            for model in models if roles is None or role in roles else ():
                model.load(device, self._options)

    def heard_by(self, hear: Hear) -> None:
        """Hand on what processes of rewards print from now on, from several threads."""
        self._pool.hear = hear

    def close(self) -> None:
        """End the processes of reward functions."""
        self._pool.close()
