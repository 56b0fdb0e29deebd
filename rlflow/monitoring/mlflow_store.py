"""The MLflow tracker.

It writes to the server in MLFLOW_TRACKING_URI or, if that isn't set, to files next to the runs.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

from rlflow.extras import require
from rlflow.monitoring.reporter import Rows, RunInfo, State

ENDED = {"done": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
SAMPLES = "samples.json"
MOST_ROWS = 400  # maximum rows in the table of samples, all of which is rewritten every time
LONGEST_PARAMETER = 500
PARAMETERS = 100  # MLflow's limit on the parameters in one call
NOT_IN_NAMES = re.compile(r"[^\w.\- /:]", re.ASCII)  # MLflow refuses a call if a name has such a character


class MLflow:
    """Tracks metrics, settings (as parameters) and samples (in one table).

    Raises PlanError if mlflow isn't installed.
    """

    def __init__(self) -> None:
        # --track mlflow does not mean consent to MLflow's telemetry
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        self._module = require("mlflow", "trackers")
        self._client: Any = None
        self._id = ""
        self._rows: list[Mapping[str, Any]] = []

    def start(self, run: RunInfo, settings: Mapping[str, Any]) -> str:
        """Create the run in MLflow with its settings, and return where to find it."""
        address = os.environ.get("MLFLOW_TRACKING_URI") or self._file_store(run)
        self._client = self._module.MlflowClient(tracking_uri=address)
        self._id = self._client.create_run(self._experiment(run.flow), run_name=run.folder.name).info.run_id
        kind = self._module.entities.Param
        parameters = [
            kind(NOT_IN_NAMES.sub("_", name), str(value)[:LONGEST_PARAMETER])
            for name, value in flat(settings)
        ]
        for first in range(0, len(parameters), PARAMETERS):
            self._client.log_batch(self._id, params=parameters[first : first + PARAMETERS])
        return f"run {self._id} in {address}"

    def _file_store(self, run: RunInfo) -> str:
        # MLflow 3 requires this variable for a file store
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        return (run.folder.parent / "mlruns").absolute().as_uri()

    def _experiment(self, flow: str) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", flow)
        experiment = self._client.get_experiment_by_name(name)
        return str(experiment.experiment_id if experiment else self._client.create_experiment(name))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step."""
        kind, now = self._module.entities.Metric, int(1000 * time.time())
        values = [kind(NOT_IN_NAMES.sub("_", name), value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=values)

    def table(self, step: int, rows: Rows) -> None:
        """Add rows of samples to the table, and rewrite the whole table."""
        if not self._rows:
            artifacts = json.dumps([{"path": SAMPLES, "type": "table"}])
            # because of this tag, MLflow's pages show the file as a table
            self._client.set_tag(self._id, "mlflow.loggedArtifacts", artifacts)
        self._rows = [*self._rows, *rows][-MOST_ROWS:]
        columns = list(dict.fromkeys(name for row in self._rows for name in row))
        table = {"columns": columns, "data": [[row.get(name) for name in columns] for row in self._rows]}
        self._client.log_text(self._id, json.dumps(table), SAMPLES)

    def close(self, state: State) -> None:
        """End the run in MLflow."""
        self._client.set_terminated(self._id, ENDED[state])


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) for each of the nested settings."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
