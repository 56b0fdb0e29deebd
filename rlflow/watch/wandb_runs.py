"""Weights & Biases: online where it knows a key or is told to by WANDB_MODE, else offline in the run's folder; it never asks."""

from __future__ import annotations

import netrc
import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from rlflow.extras import require
from rlflow.watch.reporter import Metrics, Rows, RunInfo, State


class WandB:
    """Metrics, and samples as a wandb.Table. Raises PlanError where wandb is not installed."""

    def __init__(self) -> None:
        self._module = require("wandb", "trackers")
        self._run: Any = None

    def start(self, run: RunInfo, settings: Mapping[str, Any]) -> str:
        mode = os.environ.get("WANDB_MODE") or ("online" if has_key() else "offline")
        # the console is ours, and the command line may hold what settings must not show
        own = self._module.Settings(console="off", silent=True, disable_code=True, x_disable_meta=True)
        self._run = self._module.init(
            project=os.environ.get("WANDB_PROJECT", "rlflow"), group=run.flow, name=run.folder.name, dir=str(run.folder),
            config=dict(settings), mode=mode, settings=own, reinit="create_new",
        )
        return str(self._run.url) if mode == "online" else f"{mode}; wandb sync {run.folder / 'wandb'}/*-run-* uploads it"

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log(dict(metrics), step=step)

    def table(self, step: int, rows: Rows) -> None:
        columns = list(dict.fromkeys(name for row in rows for name in row))
        table = self._module.Table(columns=columns, data=[[row.get(name) for name in columns] for row in rows])
        self._run.log({"samples": table}, step=step)

    def close(self, state: State) -> None:
        self._run.finish(exit_code=0 if state == "done" else 1)


def has_key() -> bool:
    """Whether there is a key that wandb would find without asking for one."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
