"""`--metrics-port`: a run's numbers for Prometheus, at `/metrics` of this machine's loopback."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rlflow.errors import PlanError
from rlflow.extras import require
from rlflow.monitoring.metric_names import plainly
from rlflow.monitoring.reporter import Metrics, Rows, RunInfo, State

LOOPBACK = "127.0.0.1"
UNFIT = re.compile(r"[^a-zA-Z0-9_]")  # for names of Prometheus


class Scraped:
    """A reporter that serves the last value of each metric, under its name with ``rlflow_`` before it and
    ``_`` for what is no letter."""

    def __init__(self, port: int) -> None:
        """Raises PlanError where the port is taken or the package is missing."""
        self._prometheus: Any = require("prometheus_client", "services")
        self._registry = self._prometheus.CollectorRegistry()
        self._gauges: dict[tuple[str, bool], Any] = {}  # by the name, and whether it is of a metric
        self._taken: set[str] = set()  # names of gauges
        try:
            self._server, self._thread = self._prometheus.start_http_server(
                port, addr=LOOPBACK, registry=self._registry
            )
        except OSError as error:
            raise PlanError.of(
                "metrics-port",
                f"the run's numbers cannot be served at port {port}",
                found=str(error.strerror),
                expected=f"a free port of {LOOPBACK}",
                remedy="--metrics-port with another number",
            ) from error

    def start(self, run: RunInfo) -> None:
        """Say how far the run is to go."""
        self._set({"iterations": run.iterations, "iteration": run.done}, False)

    def iteration(self, number: int, metrics: Metrics, samples: Rows, stages: Mapping[str, float]) -> None:
        """Take the metrics of an iteration, and the seconds of its nodes."""
        seconds = {f"node_seconds/{node}": seconds for node, seconds in stages.items()}
        self._set(seconds | {"iteration": number + 1}, False)
        self._set(plainly(metrics))

    def evaluation(self, number: int, metrics: Metrics) -> None:
        """Take the metrics of an evaluation."""
        self._set(plainly(metrics))

    def note(self, text: str) -> None:
        """Do nothing: notes are for users."""

    def close(self, state: State, error: str = "") -> None:
        """End the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _set(self, metrics: Mapping[str, float], of_metrics: bool = True) -> None:
        for name, value in metrics.items():
            if (name, of_metrics) not in self._gauges:
                fit = f"rlflow_{UNFIT.sub('_', name)}"
                while fit in self._taken:
                    fit += "_"
                self._taken.add(fit)
                self._gauges[name, of_metrics] = self._prometheus.Gauge(fit, name, registry=self._registry)
            self._gauges[name, of_metrics].set(value)
