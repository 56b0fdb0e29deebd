"""The three tiers of tests, and the limit of processor time for each.

Unmarked tests are the quick tier: each takes at most LIMIT seconds of processor time. `make test` also runs
tests marked `slow`; only `make long` runs those marked `long`. Processor time covers a test and every process
that it starts. It is divided by the slowdown of this machine, measured with a fixed piece of work, so that
neither a slow machine nor other load fails a run.
"""

from __future__ import annotations

import hashlib
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

LIMIT = 5.0  # seconds of an unmarked test
SUMS = {"quick": 200.0, "test": 1100.0}  # seconds of all tests of a tier
DEAREST = 15  # how many tests a run names
# seconds of the fixed piece of work on the machine where LIMIT and SUMS were measured
WORK = 0.105
NAME = "processor seconds"
EXPRESSIONS = {"quick": "not slow and not long", "test": "not long", "long": "long"}


def pytest_addoption(parser):
    parser.addoption("--tier", choices=[*EXPRESSIONS], help="run the tests of one tier and hold its budget")
    parser.addoption(
        "--slice", metavar="K/N", help="run the files whose name falls into the K-th of N parts, K from 0"
    )


def pytest_configure(config):
    if tier := config.getoption("tier"):
        config.option.markexpr = EXPRESSIONS[tier]
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Budget(config.getoption("tier")), "budget")


def pytest_collection_modifyitems(config, items):
    if part := config.getoption("slice"):
        which, count = map(int, part.split("/"))
        chosen = [item for item in items if slice_of(item.nodeid.partition("::")[0], count) == which]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
        items[:] = chosen


def slice_of(file: str, count: int) -> int:
    """Return the slice of this many that a test file belongs to: the same on every machine."""
    return int.from_bytes(hashlib.sha256(file.encode()).digest()[:8], "big") % count


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    before = spent()
    item.user_properties.append((NAME, lambda: spent() - before))
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.when == "teardown":
        report.user_properties = [
            (name, value()) if name == NAME else (name, value) for name, value in item.user_properties
        ]
        report.user_properties.append(("speed", speed()))
        report.user_properties.append(("unmarked", not any(map(item.get_closest_marker, ("slow", "long")))))
    else:
        report.user_properties = [(name, value) for name, value in item.user_properties if name != NAME]
    return report


def spent() -> float:
    """Return the processor seconds of this process, of its reaped children, and of all living processes below
    it."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used) + sum(
        map(_ticks, _below(os.getpid()))
    ) / os.sysconf("SC_CLK_TCK")


def _below(pid: int) -> Iterator[int]:
    """Yield every living process that a process has started, directly or indirectly."""
    try:
        lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:
        return
    for child in " ".join(lists).split():
        yield int(child)
        yield from _below(int(child))


def _ticks(pid: int) -> int:
    """Return the clock ticks used by a process and its reaped children."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return sum(map(int, fields[11:15]))


# (time of measurement, slowdown compared with the machine of LIMIT and SUMS)
_speeds: list[tuple[float, float]] = []


def speed() -> float:
    """Return the slowdown of this machine compared with the machine where the limits were measured, at least
    1. Measured once in 20 seconds."""
    now = time.monotonic()
    if not _speeds or now - _speeds[-1][0] > 20.0:
        began = time.process_time()
        total = 0
        for number in range(2_000_000):
            total += number & 7
        _speeds.append((now, max((time.process_time() - began) / WORK, 1.0)))
    return _speeds[-1][1]


class Budget:
    """Adds up the cost of tests, and fails a run that costs too much."""

    def __init__(self, tier: str | None) -> None:
        self.tier = tier
        self.costs: dict[str, tuple[float, bool]] = {}  # test → (scaled seconds, whether it has no mark)
        self.problems: list[str] = []

    def pytest_runtest_logreport(self, report):
        found = dict(report.user_properties)
        if report.when == "teardown" and NAME in found:
            self.costs[report.nodeid] = found[NAME] / found["speed"], found["unmarked"]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session):
        self.problems += [
            f"{name} has no mark and took {seconds:.1f} s of processor time, at most {LIMIT:g} s are "
            "allowed: make it cheaper, or mark it slow"
            for name, (seconds, unmarked) in self.costs.items()
            if unmarked and seconds > LIMIT
        ]
        total = sum(seconds for seconds, _ in self.costs.values())
        if self.tier in SUMS and total > SUMS[self.tier]:
            self.problems.append(
                f"the tier '{self.tier}' took {total:.0f} s of processor time, at most {SUMS[self.tier]:g} "
                "s are allowed: make tests cheaper, or mark some long"
            )
        if self.problems and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def by_folder(self) -> dict[str, float]:
        """Return seconds of the tests in each folder of tests/; `.` stands for the files directly in it."""
        found: dict[str, float] = {}
        for name, (seconds, _) in self.costs.items():
            inside = name.partition("::")[0].split("/")[1:]
            folder = inside[0] if len(inside) > 1 else "."
            found[folder] = found.get(folder, 0.0) + seconds
        return found

    def pytest_terminal_summary(self, terminalreporter):
        if not self.costs or self.tier is None:
            return
        total = sum(seconds for seconds, _ in self.costs.values())
        terminalreporter.section(f"{total:.0f} s of processor time in {len(self.costs)} tests; the dearest")
        for name, (seconds, _) in sorted(self.costs.items(), key=lambda each: -each[1][0])[:DEAREST]:
            terminalreporter.line(f"{seconds:7.1f} s  {name}")
        folders = sorted(self.by_folder().items(), key=lambda each: -each[1])
        terminalreporter.line(
            "by folder: " + ", ".join(f"{folder} {seconds:.0f}" for folder, seconds in folders)
        )
        for problem in self.problems:
            terminalreporter.line(problem, red=True)
