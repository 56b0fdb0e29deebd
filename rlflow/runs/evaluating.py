"""`rlflow eval`: evaluate a model folder, or a run at one of its checkpoints.

A run is evaluated just as it evaluates itself.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge

from rlflow.author.flow import Flow
from rlflow.checkpoints import durable, file_names
from rlflow.checkpoints.folder import of_run, steps
from rlflow.checkpoints.reading import Damaged, Loaded, read
from rlflow.config.flags import evaluation_names, sort_rewards
from rlflow.config.folders import model_folder
from rlflow.config.roles.opened_data import made_up
from rlflow.config.roles.prompt_room import positions_of
from rlflow.data.hub_names import folder_name
from rlflow.errors import PlanError, listed
from rlflow.monitoring.metric_names import plainly
from rlflow.monitoring.reporter import Reporter
from rlflow.runs import directory, state
from rlflow.runs.api import resolve_config
from rlflow.runs.context import RunContext
from rlflow.runs.depends import other_inputs
from rlflow.runs.evaluate import Accuracy, Evaluation, shown, unvoted
from rlflow.runs.final import answer_file
from rlflow.runs.prepare import prepare
from rlflow.runs.resume import newest, prepare_again, read_settings, recorded_values, unchanged_settings
from rlflow.runs.trust import check_trusted


@dataclass(frozen=True)
class Answering:
    """How answers are sampled, in addition to ``--actor.generate.NAME``."""

    # length of an answer; by default at most half of the model's positions
    max_tokens: Annotated[int, Ge(1)] = 512


def answer(prompts: Any, actor: Any, hp: Any = Answering()) -> None:
    """Sample an answer to each prompt."""
    actor.generate(prompts, max_tokens=hp.max_tokens)


ANSWER = Flow(answer, trains=False)


ANSWERS, FIGURES = "answers.jsonl", "evaluation.json"  # files in the folder of an evaluation
NO_SETTINGS = ("name", "track", "out")  # flags of the run that an evaluation does not use


@dataclass(frozen=True)
class Evaluated:
    """A model's figures, and the folder with its answers."""

    model: Path  # the model's folder, or the checkpoint
    iteration: int | None  # of the checkpoint; None for a model folder
    accuracy: Accuracy
    folder: Path

    def as_json(self) -> dict[str, Any]:
        """Return the content of evaluation.json except for the settings."""
        figures = plainly(shown(self.accuracy))
        return {
            "model": str(self.model),
            "iteration": self.iteration,
            "evaluation": figures,
            "folder": str(self.folder),
        }


def evaluate_folder(folder: Path, values: Mapping[str, Any], out: Path, reporter: Reporter) -> Evaluated:
    """Evaluate a Hugging Face model folder on the sets given with ``--eval``.

    ``values``: flag → value, as for a run. Rewards that don't name a set score all sets without a reward of
    their own. The answers go to a new folder in ``out``. Raises PlanError if the values are invalid.
    """
    model_folder(str(folder), "rlflow eval")
    if not values.get("eval"):
        raise PlanError.of(
            "eval-nothing",
            "no prompts to evaluate the model on",
            found="no --eval",
            expected="--eval with a file of prompts",
            remedy=f"rlflow eval {folder} --eval NAME=FILE",
        )
    tokens = (
        {"hp.max_tokens": min(Answering().max_tokens, positions // 2)}
        if (positions := positions_of(folder))
        else {}
    )
    given = {**tokens, **with_rewards({}, values), "model": str(folder), "held_out": 0}
    config, hp = resolve_config(ANSWER, None, given, use_packaged_task=False)
    context = prepare(ANSWER, hp, config, reporter.note, judge=None, data=made_up(ANSWER))
    return _measured(context, folder, None, out, folder_name(folder), reporter)


def evaluate_run(
    folder: Path,
    values: Mapping[str, Any],
    out: Path,
    reporter: Reporter,
    checkpoint: int | None = None,
    trust: bool = False,
) -> Evaluated:
    """Evaluate a run at its newest intact checkpoint, or at the one after ``checkpoint`` iterations.

    If ``values`` gives sets with ``--eval``, these are used instead of the run's own held-out prompts and
    sets. The answers go to a new folder in ``out``. ``trust``: as for ``resume``. Raises PlanError if the run
    can't be prepared again or the checkpoint is missing.
    """
    folder = folder.absolute()
    saved = read_settings(folder)
    loaded = newest(folder, reporter) if checkpoint is None else checkpoint_of(folder, checkpoint)
    sets = evaluation_names(values.get("eval") or saved["values"].get("eval") or ())
    saved = {**saved, "values": without_sets(saved["values"], sets)}
    changes = {
        **dict.fromkeys(NO_SETTINGS),
        "track": (),
        "out": "runs",
        **with_rewards(saved["values"], values),
    }
    check_trusted(folder, saved, unchanged_settings(saved, changes), trust, reporter)
    context = prepare_again(saved, changes, reporter, partial(other_inputs, folder, reporter))
    try:
        context.executor.queues.do("control", partial(state.restore_models, context, loaded.snapshot))
        if values.get("eval") and isinstance(context.evaluation, Evaluation):
            context.evaluation = context.evaluation.only(sets)
    except BaseException:
        context.close()
        raise
    return _measured(context, loaded.path, loaded.snapshot.iteration, out, folder.name, reporter)


def without_sets(saved: Mapping[str, Any], names_of_sets: Collection[str]) -> dict[str, Any]:
    """Return a run's values with only those sets of ``--eval`` that are in ``names_of_sets``.

    The other sets' settings, and rewards that score only those sets, are removed too.
    """
    dropped = [name for name in evaluation_names(saved.get("eval") or ()) if name not in names_of_sets]
    values = {
        name: value
        for name, value in saved.items()
        if not any(name.startswith(f"data.{each}.") for each in dropped)
    }
    rewards = [
        reward for reward in saved.get("reward") or () if not any(_judges(reward, name) for name in dropped)
    ]
    return values | ({"reward": rewards} if "reward" in saved else {})


def with_rewards(saved: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` with the rewards of both the run and the evaluation.

    If a reward in ``values`` doesn't name a set, it scores each set without a reward of its own. The run's
    rewards are kept, unless they score only one of these sets. ``saved``: the run's values.
    """
    if not values.get("reward"):
        return dict(values)
    sets = evaluation_names(values.get("eval") or saved.get("eval") or ())
    general, named = sort_rewards({"reward": values["reward"], "eval": [f"{name}=-" for name in sets]})
    lacking = [name for name in sets if not any(_judges(reward, name) for reward in named)]
    own = [*named, *(f"{reward}@{name}" for name in lacking for reward in general)]
    before = [
        reward for reward in saved.get("reward") or () if not any(_judges(reward, name) for name in sets)
    ]
    return {**values, "reward": (*before, *own)}


def _judges(reward: Any, name: str) -> bool:
    """Return whether the reward scores only the set ``name``."""
    return bool(sort_rewards({"reward": (reward,), "eval": (f"{name}=-",)})[1])


def checkpoint_of(folder: Path, iteration: int) -> Loaded:
    """Return a run's checkpoint after ``iteration`` iterations.

    Raises PlanError if it doesn't exist or is damaged.
    """
    there = {
        path: number
        for path in steps(of_run(folder))
        if (number := (file_names.of_step(path.name) or (-1,))[0]) >= 0
    }
    path = next((path for path, number in there.items() if number == iteration), None)
    if path is None:
        known = sorted(set(there.values()))
        raise PlanError.of(
            "no-checkpoint",
            f"the run has no checkpoint after {iteration} iterations",
            found=f"checkpoints after {listed(map(str, known))}" if known else "no checkpoint",
            expected="a checkpoint that was kept (--keep)",
            remedy=f"--checkpoint {known[-1]}" if known else "--save-every",
        )
    try:
        return Loaded(read(path), path, [])
    except Damaged as damage:
        raise PlanError.of(
            "checkpoint-damaged",
            f"the checkpoint '{path}' is damaged",
            found=str(damage),
            expected="an undamaged checkpoint",
            remedy="leave --checkpoint out to use the newest good checkpoint",
        ) from damage


def _measured(
    context: RunContext, model: Path, iteration: int | None, out: Path, name: str, reporter: Reporter
) -> Evaluated:
    """Run the evaluation, write its answers and figures, and close the context."""
    try:
        if context.evaluation is None:
            raise PlanError.of(
                "eval-nothing",
                "no prompts to evaluate on",
                found="no held-out prompts that a reward scores",
                expected="--eval, and a backend with models",
                remedy="--eval NAME=FILE",
            )
        folder = directory.create(out, None, name)
        try:
            with context.computing(), answer_file(folder / ANSWERS, _raised) as keep:
                evaluated = Evaluated(model.absolute(), iteration, context.evaluation(keep), folder)
            for line in unvoted(evaluated.accuracy):
                reporter.note(line)
            content = {**evaluated.as_json(), "settings": recorded_values(context.settings)}
            durable.write(folder / FIGURES, [f"{json.dumps(content, indent=1, default=str)}\n".encode()])
        except BaseException:
            durable.delete(folder)
            raise
        return evaluated
    finally:
        context.close()


def _raised(error: OSError) -> None:
    raise error
