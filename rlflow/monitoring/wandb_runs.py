"""The Weights & Biases tracker. It never asks for a key.

It is online if there is a key or WANDB_MODE says so. Otherwise, it is offline and writes to the run's folder.
"""

from __future__ import annotations

import netrc
import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from rlflow.extras import require
from rlflow.monitoring.reporter import Rows, RunInfo, State


class WandB:
    """Tracks metrics, and samples as a wandb.Table. Raises PlanError if wandb isn't installed."""

    def __init__(self) -> None:
        self._module = require("wandb", "trackers")
        self._run: Any = None

    def start(self, run: RunInfo, settings: Mapping[str, Any]) -> str:
        """Start a run in wandb, and return its URL or the command that uploads it later."""
        mode = os.environ.get("WANDB_MODE") or ("online" if has_key() else "offline")
        # rlflow prints its own progress; the command line may contain secrets
        wandb_settings = self._module.Settings(
            console="off", silent=True, disable_code=True, x_disable_meta=True
        )
        self._run = self._module.init(
            project=os.environ.get("WANDB_PROJECT", "rlflow"),
            group=run.flow,
            name=run.folder.name,
            dir=str(run.folder),
            config=dict(settings),
            mode=mode,
            settings=wandb_settings,
            reinit="create_new",
        )
        return (
            str(self._run.url)
            if mode == "online"
            else f"{mode}; wandb sync {run.folder / 'wandb'}/*-run-* uploads it"
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a step's metrics."""
        self._run.log(dict(metrics), step=step)

    def table(self, step: int, rows: Rows) -> None:
        """Write rows of samples as a table."""
        columns = list(dict.fromkeys(name for row in rows for name in row))
        table = self._module.Table(
            columns=columns, data=[[row.get(name) for name in columns] for row in rows]
        )
        self._run.log({"samples": table}, step=step)

    def close(self, state: State) -> None:
        """End the run in wandb."""
        self._run.finish(exit_code=0 if state == "done" else 1)


def has_key() -> bool:
    """Whether wandb finds a key without prompting for one."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
