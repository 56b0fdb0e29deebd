"""TensorBoard: event files in the run's folder, so that `tensorboard --logdir runs` finds all runs."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from typing import Any

from rlflow.extras import require
from rlflow.monitoring.reporter import Rows, RunInfo, State


class TensorBoard:
    """Scalars, and samples as a Markdown table of text. Raises PlanError where tensorboard is not installed."""

    def __init__(self) -> None:
        require("tensorboard", "trackers")
        self._module = require("torch.utils.tensorboard", "trackers")
        self._writer: Any = None

    def start(self, run: RunInfo, settings: Mapping[str, Any]) -> str:
        """Open the event file of a run. Gives where to look for it."""
        folder = run.folder / "tensorboard"
        self._writer = self._module.SummaryWriter(str(folder), flush_secs=10)
        self._writer.add_text("settings", f"<pre>{html.escape(json.dumps(settings, indent=1, default=str))}</pre>", 0)
        return f"{folder} (tensorboard --logdir {run.folder.parent})"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def table(self, step: int, rows: Rows) -> None:
        """Write rows of samples."""
        self._writer.add_text("samples", markdown(rows), step)

    def close(self, state: State) -> None:
        """Write what waits and close the file."""
        self._writer.close()


def markdown(rows: Rows) -> str:
    """Rows as a Markdown table; whatever they hold, it stays text in its cell."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, ["---"] * len(columns), *([_cell(row.get(name)) for name in columns] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(value: Any) -> str:
    text = html.escape("" if value is None else str(value))
    for sign in "\\`*_[]|":
        text = text.replace(sign, f"&#{ord(sign)};")
    return " ".join(text.splitlines())
