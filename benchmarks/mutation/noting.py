"""A pytest plugin for a probed copy, which records which test reaches which probe.

The plugin selects the row of the hits file that probes write to, and logs the rows and seconds of each test.
Each test has its own row. The rows of the shared fixtures that it uses also count for it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from mutation_probe import HEAD, mapped


class Notes:
    """The plugin's state.

    ``rows``: number of rows used so far; row 0 is for code outside tests. ``shared``: the row of each shared
    fixture, by (fixture name, base id).
    """

    def __init__(self, folder: Path) -> None:
        self.current = mapped(str(folder / "hits"))
        self.lines = folder / "tests.jsonl"
        self.rows = 1
        self.shared: dict[tuple[str, str], int] = {}

    def _to(self, row: int) -> None:
        self.current[:HEAD] = row.to_bytes(HEAD, "little")

    def _new(self) -> int:
        self.rows += 1
        return self.rows - 1

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        row, since = self._new(), time.monotonic()
        self._to(row)
        try:
            return (yield)
        finally:
            self._to(0)
            used = [
                shared
                for (name, base), shared in self.shared.items()
                if name in getattr(item, "fixturenames", ()) and item.nodeid.startswith(base)
            ]
            # the test's own row, and the rows of shared fixtures that were set up during this test
            made = range(row, self.rows)
            line = {
                "test": item.nodeid,
                "rows": sorted({*made, *used}),
                "seconds": round(time.monotonic() - since, 4),
            }
            with self.lines.open("a") as file:
                file.write(json.dumps(line) + "\n")

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
        if fixturedef.scope == "function":
            return (yield)
        before, row = int.from_bytes(self.current[:HEAD], "little"), self._new()
        self.shared[fixturedef.argname, fixturedef.baseid] = row
        self._to(row)
        try:
            return (yield)
        finally:
            self._to(before)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Notes(Path(os.environ["RLFLOW_MUTATION_NOTES"])))
