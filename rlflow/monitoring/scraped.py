"""`--metrics-port`: serve a run's metrics to Prometheus, under `/metrics` on the loopback address."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rlflow.errors import PlanError
from rlflow.extras import require
from rlflow.monitoring.metric_names import plainly
from rlflow.monitoring.reporter import Metrics, Rows, RunInfo, State

LOOPBACK = "127.0.0.1"
UNFIT = re.compile(r"[^a-zA-Z0-9_]")  # characters that Prometheus does not allow in names


class Scraped:
    """A reporter that serves the latest value of each metric.

    The name is rlflow's, with ``rlflow_`` in front and special characters replaced with ``_``.
    """

    def __init__(self, port: int) -> None:
        """Start the server.

        Raises PlanError if the port is in use or the Prometheus client isn't installed.
        """
        self._prometheus: Any = require("prometheus_client", "services")
        self._registry = self._prometheus.CollectorRegistry()
        self._gauges: dict[tuple[str, bool], Any] = {}  # (name, whether it is the name of a metric) → gauge
        self._taken: set[str] = set()  # names that gauges already have
        try:
            self._server, self._thread = self._prometheus.start_http_server(
                port, addr=LOOPBACK, registry=self._registry
            )
        except OSError as error:
            raise PlanError.of(
                "metrics-port",
                f"the run's metrics cannot be served on port {port}",
                found=str(error.strerror),
                expected=f"a free port on {LOOPBACK}",
                remedy="--metrics-port with another number",
            ) from error

    def start(self, run: RunInfo) -> None:
        """Set how many iterations are planned and how many are finished."""
        self._set({"iterations": run.iterations, "iteration": run.done}, False)

    def iteration(self, number: int, metrics: Metrics, samples: Rows, stages: Mapping[str, float]) -> None:
        """Set an iteration's metrics and the seconds of its nodes."""
        seconds = {f"node_seconds/{node}": seconds for node, seconds in stages.items()}
        self._set(seconds | {"iteration": number + 1}, False)
        self._set(plainly(metrics))

    def evaluation(self, number: int, metrics: Metrics) -> None:
        """Set an evaluation's metrics."""
        self._set(plainly(metrics))

    def note(self, text: str) -> None:
        """Ignore notes; they aren't metrics."""

    def close(self, state: State, error: str = "") -> None:
        """Stop the server."""
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
