"""Comparisons with real processes of a system that takes no time: turns, failures, deadlines, kills."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlflow.benchmarks.journal import read
from rlflow.benchmarks.measured_process import CellFailed, CellProcess
from rlflow.benchmarks.results import block_seconds

pytestmark = pytest.mark.slow  # complete runs, models or processes: together these tests take long

COUNTING = Path(__file__).parent / "counting.py"
TWO = """
    [suite]
    block = 3
    deadline = 60
    [base]
    system = "SYSTEM"
    seconds = 0.5
    iterations = 9
    [[cell]]
    name = "one"
    [[cell]]
    name = "two"
    tokens = 11
    """


def turns(measured, key):
    return [
        (turn.seed, turn.round, [row["iteration"] for row in turn.iterations]) for turn in measured[key].turns
    ]


def test_cells_take_turns_in_a_rotating_order(suite, bench, tmp_path):
    complete, progress, keys = bench(suite(TWO))
    assert complete
    measured = read(tmp_path / "out")
    for name in ("one", "two"):
        assert turns(measured, keys[name]) == [(0, 0, [0, 1, 2]), (0, 1, [3, 4, 5]), (0, 2, [6, 7, 8])]
        assert measured[keys[name]].done == {0}
    assert [line.split(",")[1] for line in progress] == [" one", " two", " two", " one", " one", " two"]
    assert list((tmp_path / "out").glob("cells/*/seed-0/closed")), "a system is closed"


def test_all_cells_run_a_seed_before_the_next(suite, bench, tmp_path):
    bench(suite(TWO.replace("[suite]", "[suite]\nseeds = [4, 7]")))
    lines = [line for cell in read(tmp_path / "out").values() for line in cell.turns]
    assert {turn.seed for turn in lines} == {4, 7}


def test_complete_run_turns_load_one_cell_at_a_time(suite, bench, tmp_path):
    text = TWO.replace("block = 3", "block = 9\nseeds = 2").replace(
        "seconds = 0.5", "seconds = 0.5\nalone = true"
    )
    _, progress, keys = bench(suite(text))
    assert [line.split(",")[1] for line in progress] == [" one", " two", " two", " one"]
    measured = read(tmp_path / "out")
    assert {seed for key in keys.values() for seed in measured[key].done} == {0, 1}
    assert all(0 < seconds < 20 for key in keys.values() for seconds in measured[key].starts.values())
    assert all(turn.seconds > 0 for key in keys.values() for turn in measured[key].turns)


def test_first_turns_and_settling_iterations_are_not_timed(suite, bench, tmp_path):
    _, _, keys = bench(suite(TWO.replace("block = 3", "block = 3\nrounds = 3\nsettle = 2")))
    assert [turn.timed for turn in read(tmp_path / "out")[keys["one"]].turns] == [[], [5], [8]]


def test_rounds_end_once_the_verdicts_are_decided(suite, bench, tmp_path):
    def decided(measured):
        return sum(len(cell.turns) for cell in measured.values()) >= 4

    complete, _, keys = bench(suite(TWO.replace("block = 3", "block = 3\nrounds = 9")), decided=decided)
    assert complete
    assert [len(read(tmp_path / "out")[keys[name]].turns) for name in ("one", "two")] == [2, 2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "cause"),
    [
        ('fails = "prepare"', "ValueError: no such model"),
        ("fails = 4", "RuntimeError: iteration 4 does not work"),
        ("hangs = 4\n", "no answer to 'iterate' within 0.7 s"),
    ],
)
def test_a_failed_cell_is_recorded_and_others_continue(suite, bench, tmp_path, flags, cause):
    text = TWO.replace("tokens = 11", flags)
    _, progress, keys = bench(
        suite(text.replace("deadline = 60", "deadline = 0.7") if "hangs" in flags else text)
    )
    measured = read(tmp_path / "out")
    assert cause in measured[keys["two"]].failed[0]
    assert measured[keys["two"]].done == set()
    assert measured[keys["one"]].done == {0}
    assert any(line.startswith("two, seed 0 failed") for line in progress)


def test_finished_work_is_kept_and_a_failed_cell_is_retried(suite, bench, tmp_path):
    bench(suite(TWO.replace("tokens = 11", "fails = 4")))
    before = read(tmp_path / "out")
    _, progress, keys = bench(suite(TWO.replace("tokens = 11", "fails = 4")))
    assert len(read(tmp_path / "out")[keys["one"]].turns) == len(before[keys["one"]].turns)
    assert not any(" one," in line for line in progress)
    assert any("two" in line for line in progress)


SPEED = TWO.replace("block = 3", "block = 3\nrounds = 4") + '[goal]\n    metric = "none of these"\n'


def killed_in_the_second_round(suite):
    """Start a comparison in a process, and kill it after the first turn of its second round."""
    code = (
        f"import sys, time; sys.path[:0] = {sys.path!r}\nfrom pathlib import Path\nfrom "
        "rlflow.benchmarks.cells import compile_cells\nfrom rlflow.benchmarks.runner import Runner\nfrom "
        "rlflow.benchmarks.suite import read_suite\nfrom rlflow.compiler.trace.compile import "
        "TraceOptions\ndef say(line):\n    print(line, flush=True)\n    line.startswith('round 1') and "
        f"time.sleep(1000)\nsuite = read_suite(Path({str(suite)!r}))\ncells = compile_cells(suite, lambda "
        f"config: TraceOptions())\nRunner(suite, cells, Path({str(suite.parent / 'out')!r}), say, lambda "
        "measured: False).run()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert [parent.stdout.readline().split(",")[0] for _ in range(3)] == ["round 0", "round 0", "round 1"]
        parent.send_signal(signal.SIGKILL)


def test_a_killed_speed_comparison_continues_with_equal_work(suite, bench, tmp_path):
    compared = suite(SPEED)
    (tmp_path / "out").mkdir()
    killed_in_the_second_round(tmp_path / "suite.toml")
    _, _, keys = bench(compared)
    measured = read(tmp_path / "out")
    assert [row[1:] for row in turns(measured, keys["two"])][:3] == [
        (0, [0, 1, 2]),
        (1, [3, 4, 5]),
        (2, [6, 7, 8]),
    ]
    assert [row[1:] for row in turns(measured, keys["one"])][:3] == [
        (0, [0, 1, 2]),
        (2, [3, 4, 5]),
        (3, [6, 7, 8]),
    ]
    for name in ("one", "two"):
        kept = block_seconds(measured[keys[name]])
        assert {(0, 3), (0, 4)} <= set(kept), "rounds after the first of the new process count"
        assert (0, 2) not in kept, "the first round of the new process does not count"


def test_a_failed_speed_cell_is_retried_with_the_base(suite, bench, tmp_path):
    text = SPEED.replace("tokens = 11", 'fails_without = "mended"')
    bench(suite(text))
    (tmp_path / "out" / "mended").touch()
    _, progress, keys = bench(suite(text), decided=lambda measured: True)
    assert sorted(line.split(",")[1] for line in progress) == [" one", " two"]
    measured = read(tmp_path / "out")
    assert not measured[keys["two"]].failed
    assert turns(measured, keys["two"])[-1][1] == turns(measured, keys["one"])[-1][1]


def test_a_budget_stops_between_turns_and_the_next_call_continues(suite, bench, tmp_path):
    assert not bench(suite(TWO), budget=0.0)[0]
    assert read(tmp_path / "out") == {}
    assert bench(suite(TWO))[0]


def test_a_system_ends_with_its_comparison(tmp_path):
    code = (
        f"import sys; sys.path[:0] = {sys.path!r}\nfrom pathlib import Path; from "
        "rlflow.benchmarks.measured_process import CellProcess\ncell = CellProcess(sys.executable, "
        f"Path({str(COUNTING)!r}), Path({str(tmp_path)!r}) / 'log', 60)\ncell.ask('prepare', "
        f"cell={{'flags': {{'iterations': 9, 'seconds': 1, 'hangs': 0}}}}, folder={str(tmp_path)!r}, "
        "seed=0)\nprint(cell.process.pid, flush=True)\ncell.ask('iterate', count=1)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        child = os.pidfd_open(int(parent.stdout.readline()))
        parent.send_signal(signal.SIGKILL)
    assert select.select([child], [], [], 20)[0], "the child is still running"
    os.close(child)


def test_a_process_that_exits_is_a_failure_with_its_last_lines(tmp_path):
    file = tmp_path / "leaves.py"
    file.write_text(
        "import os\nclass System:\n    def prepare(self, **_):\n        print('on its way out', flush=True)\n"
        "        os._exit(3)\n"
    )
    cell = CellProcess(sys.executable, file, tmp_path / "log", 20)
    with pytest.raises(CellFailed, match=r"(?s)ended with code 3.*on its way out"):
        cell.ask("prepare", cell={}, folder=str(tmp_path), seed=0)
    cell.close()


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")
def test_memory_freed_within_a_turn_counts(tmp_path):
    file = tmp_path / "swells.py"
    file.write_text(
        "class System:\n    def prepare(self, **_):\n        return 0\n    def iterate(self, count):\n"
        "        return len(bytearray(b'1') * 200_000_000)\n    def close(self):\n        pass\n"
    )
    cell = CellProcess(sys.executable, file, tmp_path / "log", 20)
    cell.ask("prepare")
    before = cell.use().memory
    cell.ask("iterate", count=1)
    assert 190e6 < cell.use().memory - before < 260e6
    cell.close()
