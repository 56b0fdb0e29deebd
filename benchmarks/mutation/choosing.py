"""A pytest plugin for the fork that tests a mutant. It runs only the chosen tests.

The plugin also logs when each test starts and ends. If the process dies, the log shows which test was
running.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest


class Choice:
    """Selects the tests to run, and logs them.

    ``wanted``: tests or test files to run. ``log``: log file with a line for each start, failure and end of a
    test.
    """

    def __init__(self, wanted: list[str], log: Path) -> None:
        self.wanted, self.log = set(wanted), log

    def _log(self, what: str, test: str) -> None:
        with self.log.open("a") as file:
            file.write(json.dumps([what, test]) + "\n")

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        chosen = [
            item for item in items if item.nodeid in self.wanted or item.nodeid.split("::")[0] in self.wanted
        ]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
        items[:] = chosen

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._log("failed", report.nodeid)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._log("began", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._log("failed", report.nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._log("ended", nodeid)


def pytest_configure(config: pytest.Config) -> None:
    folder = Path(os.environ["RLFLOW_MUTATION_CHOICE"])
    config.pluginmanager.register(
        Choice(json.loads((folder / "tests.json").read_text()), folder / "log.jsonl")
    )
