"""A run's parts and its result, as plain records shared by the modules of this package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlflow.author.figures import Cause
from rlflow.compiler.plan import Plan
from rlflow.config.options import Options
from rlflow.data.prompts import Prompts
from rlflow.errors import Reason
from rlflow.execution.engine import Engine
from rlflow.execution.executor import Executor
from rlflow.execution.follow_ups import Asking
from rlflow.execution.lookahead import Ahead
from rlflow.execution.memory.prompt_draws import PromptDraws
from rlflow.execution.queues import Queues, all_for
from rlflow.processes.watchdog.beside import Watchdog
from rlflow.rewards.environments.environment_pool import EnvironmentPool
from rlflow.runs.bounds import RunTotals
from rlflow.runs.depends import Dependencies
from rlflow.runs.evaluate import Accuracy, Evaluation, FlowEvaluation
from rlflow.runs.guards import WeightCheck
from rlflow.runs.recovery import Workers
from rlflow.services.running import Services
from rlflow.training.protocols import Trainer


@dataclass(frozen=True)
class EngineInputs:
    """What a run passes to its engine besides the plan, the options and the models."""

    prompts: Prompts  # the cursor over the data
    draws: PromptDraws | None  # draws prompts by weight; None: they come in the data's order
    asking: Asking
    sampling: Mapping[str, Mapping[str, Any]]  # as ``RunConfig.sampling``
    environments: Mapping[str, EnvironmentPool]  # by role


@dataclass(frozen=True)
class Runtime:
    """The engine, queues and pools that execute a plan."""

    plan: Plan
    engine: Engine
    queues: Queues
    # returns the first reason for each cause of missing scores
    reasons: Callable[[], Mapping[Cause, Reason]]
    close: Callable[[], object]  # stops everything that was started for this runtime
    ahead: Ahead | None = None  # samples later iterations, with --staleness above 0
    workers: Workers | None = None  # the workers of pools, for recovery; None in one process


@dataclass(kw_only=True)
class RunContext:
    """Everything a run needs, put together before its first iteration."""

    plan: Plan
    engine: Engine
    executor: Executor
    prompts: Prompts  # the cursor over the data
    options: Options
    evaluation: Evaluation | FlowEvaluation | None  # None if no held-out prompts can be scored
    settings: Mapping[str, Any]  # the content of settings.json
    # role that the run may change → the small files of its model folder
    files: Mapping[str, Mapping[str, bytes]]
    inputs: Dependencies | None  # dependencies other than settings and plan; None if there was no judge
    # returns the first reason for each cause of missing scores
    reasons: Callable[[], Mapping[Cause, Reason]]
    stop: Callable[[], None]  # stops everything that was started, except the watchdog
    watchdog: Watchdog
    ahead: Ahead | None = None  # samples later iterations, with --staleness above 0
    workers: Workers | None = None  # the workers of pools, for recovery; None in one process
    weight_check: WeightCheck | None = None  # compares trainer and generator on fixed tokens
    on_output: Callable[[Callable[[bytes], object]], object] = lambda on_output: (
        None
    )  # forwards what rewards print
    # the services of the run, and their processes
    services: Services = field(default_factory=lambda: Services((), {}, {}, Path(), ""))
    # makes a trainer in this process, for each role trained by several ranks
    alone: Mapping[str, Callable[[], Trainer]] = field(default_factory=dict)
    unmeasured: str = ""  # why accuracy is not measured although held-out prompts exist
    resizing: frozenset[str] = frozenset()  # roles whose trainers can change the number of tokens per pass

    def computing(self) -> AbstractContextManager[None]:
        """Return a context in which models may use all threads while everything else uses one."""
        return all_for(self.executor.queues, "model")

    def close(self) -> None:
        """Stop all processes and threads that were started for the run."""
        try:
            self.stop()
        finally:
            self.services.close()
            self.watchdog.close()


@dataclass(frozen=True)
class RunStart:
    """Where a run starts: at its first iteration, or after the last iteration saved in a checkpoint."""

    iteration: int = 0
    before: Accuracy | None = None  # accuracy of the first weights; None if not yet measured
    answers: list[dict[str, str]] = field(default_factory=list)  # answers sampled with the first weights
    # accuracy of the weights at this point; None if they were not evaluated
    here: Accuracy | None = None


@dataclass
class RunResult:
    """The outcome of a run."""

    folder: Path
    iterations: int
    seconds: float
    before: Accuracy | None  # accuracy of the first weights; None if there was nothing to evaluate
    after: Accuracy | None  # accuracy of the last weights; None if there was nothing to evaluate
    totals: RunTotals
    # held-out prompts with the answers before and after training
    answers: list[dict[str, str]] = field(default_factory=list)
    last: dict[str, float] = field(default_factory=dict)  # metrics of the last iteration
    skipped: int = 0  # iterations without rows to train on
    unmeasured: str = ""  # why no accuracy was measured although held-out prompts exist
    unsaved: str = ""  # why the state isn't in the run's folder, and where it is; "" if it is
    shown: str = ""  # ``folder`` for messages, relative if it is in the working directory

    def _repr_html_(self) -> str:
        """Return the run's numbers and learning curve as HTML, for notebooks."""
        from rlflow.monitoring.page import run_html

        rows = [
            ("run", self.shown or str(self.folder)),
            ("iterations", f"{self.iterations}"),
            ("seconds", f"{self.seconds:.1f}"),
        ]
        for name, accuracy in (("before", self.before), ("after", self.after)):
            if accuracy is not None:
                rows.append(
                    (f"held out, {name}", f"sampled {accuracy.sampled:.1%}, greedy {accuracy.greedy:.1%}")
                )
        return run_html(self.folder, rows)

    def as_json(self) -> dict[str, Any]:
        """Return the result as plain values. ``--json`` prints them as its last line."""
        return {
            "accuracy_before": self.before and self.before.sampled,
            "accuracy_after": self.after and self.after.sampled,
            "greedy_before": self.before and self.before.greedy,
            "greedy_after": self.after and self.after.greedy,
            "iterations": self.iterations,
            "seconds": round(self.seconds, 2),
            "run": str(self.folder),
            "unsaved": self.unsaved or None,
            "bounds": self.totals.as_json(),
        }


@dataclass(frozen=True)
class LoopTotals:
    """Counts and times that the loop adds up over all iterations."""

    totals: RunTotals  # times of the nodes
    last: dict[str, float]  # metrics of the last iteration
    skipped: int  # iterations without rows to train on
    bad: int  # for how many iterations in a row some update has taken no step
