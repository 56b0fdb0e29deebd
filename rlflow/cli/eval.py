"""`rlflow eval`: measure the accuracy of a model folder or a run's checkpoint on held-out prompts."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from rlflow.checkpoints import file_names
from rlflow.checkpoints.file_names import MANIFEST
from rlflow.config.flags import parse_flags
from rlflow.data import hub
from rlflow.data.hub_names import hub_model
from rlflow.errors import PlanError
from rlflow.monitoring.history import find_run
from rlflow.monitoring.metric_names import accuracies, share
from rlflow.monitoring.plain_display import Plain
from rlflow.monitoring.reporter import Quiet
from rlflow.monitoring.tables import output, plain

if TYPE_CHECKING:
    from rlflow.runs.evaluating import Evaluated


def evaluate(what: str, arguments: Sequence[str], checkpoint: int | None, out: str, trust: bool) -> int:
    """Evaluate a model folder, a run or one of its checkpoints, and return the exit code.

    ``arguments``: the command's flags. Raises PlanError and StageError.
    """
    flags = parse_flags(arguments)
    quiet, as_json = bool(flags.pop("quiet", False)), bool(flags.pop("json", False))
    reporter = Quiet() if quiet else Plain(sys.stderr if as_json else sys.stdout)
    try:
        evaluated = _evaluated(Path(what), flags, checkpoint, Path(out), trust, reporter)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("stopped; no answers were saved") from None
    if as_json:
        print(json.dumps(evaluated.as_json()))
    else:
        output(
            [
                plain(f"{evaluated.model}{_after(evaluated.iteration)}"),
                table(evaluated),
                plain(f"answers: {evaluated.folder}"),
            ]
        )
    return 0


def _evaluated(
    what: Path, flags: dict[str, Any], checkpoint: int | None, out: Path, trust: bool, reporter: Any
) -> Evaluated:
    if (name := hub_model(str(what))) is not None:
        what = hub.complete_model(hub.pinned(name), reporter.note)
    if (what / "config.json").is_file():
        if checkpoint is not None:
            raise PlanError.of(
                "eval-checkpoint",
                f"'{what}' is a model folder and has no checkpoints",
                found=f"--checkpoint {checkpoint}",
                expected="the folder of a run",
                remedy="omit --checkpoint, or name the run",
            )
        from rlflow.runs.evaluating import evaluate_folder  # loads backends, which takes seconds

        tokens = {"hp.max_tokens": flags.pop("max_tokens")} if "max_tokens" in flags else {}
        return evaluate_folder(what, {**flags, **tokens}, out, reporter)
    if (what / MANIFEST).is_file() and (step := file_names.of_step(what.absolute().name)):
        what, checkpoint = what.absolute().parent.parent, step[0]
    run = find_run(str(what))

    from rlflow.runs.evaluating import evaluate_run

    return evaluate_run(run, flags, out, reporter, checkpoint, trust)


def _after(iteration: int | None) -> str:
    return "" if iteration is None else f", after {iteration} iteration{'s' * (iteration != 1)}"


def table(evaluated: Evaluated) -> Table:
    """Return a table with a row for each measured value."""
    from rlflow.runs.evaluate import shown

    lines = Table("held-out accuracy", "", box=None, padding=(0, 2, 0, 0))
    for name, value in accuracies(shown(evaluated.accuracy)).items():
        lines.add_row(plain(name), share(value))
    if evaluated.accuracy.score is not None:
        lines.add_row("mean score", f"{evaluated.accuracy.score:.3f}")
    return lines
