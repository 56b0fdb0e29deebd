"""`rlflow bench`: from a suite to its table, and its errors."""

import json
from pathlib import Path

import pytest
from sources import TESTS

from rlflow.benchmarks.suite import read_suite
from rlflow.cli.bench import duration, made
from rlflow.cli.main import exit_code
from rlflow.errors import PlanError

pytestmark = pytest.mark.slow  # whole runs, models or processes: each test is short, all together are not

COUNTING = TESTS / "benchmarks" / "counting.py"
TWO = f"""
[suite]
block = 2
settle = 0
deadline = 20
[base]
system = "{COUNTING}"
iterations = 4
[[cell]]
name = "one"
seconds = 0.5
learns = 0.1
[[cell]]
name = "two"
seconds = 1.0
"""


@pytest.fixture
def bench(tmp_path, monkeypatch, capsys):
    """Run the command in an empty folder; return exit code, standard output and standard error."""
    monkeypatch.chdir(tmp_path)

    def run(text, *flags):
        Path("mine.toml").write_text(text)
        code = exit_code(["bench", "mine.toml", *flags])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def test_the_table_has_a_row_for_each_cell_with_its_numbers(bench):
    code, out, err = bench(TWO, "--markdown", "table.md")
    assert code == 0, err
    assert "round 1, two, seed 0: 2 iterations in 2.0 s, to iteration 3" in err
    page = Path("table.md").read_text().split("\n\n")
    rows, seeds = (
        [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
        for table in page[1:3]
    )
    heads = rows[0]
    assert heads[0] == "cell"
    assert [row[0] for row in rows[2:]] == ["one", "two"]
    column = heads.index("s/iteration")
    assert [row[column] for row in rows[2:]] == ["0.500", "1.000"]
    assert [row[heads.index("evaluation/sampled")] for row in rows[2:]] == ["0.400", "0.000"]
    assert "one" in out
    assert "moved" not in heads  # no cell says so
    assert seeds[0][2] == "sampled before → after"
    assert [row[:3] for row in seeds[2:]] == [["one", "0", "20.0% → 40.0%"], ["two", "0", "0.0% → 0.0%"]]


def test_json_has_the_parts_of_every_key(bench):
    code, out, _ = bench(TWO, "--json")
    assert code == 0
    page = json.loads(out)
    assert [cell["name"] for cell in page["cells"]] == ["one", "two"]
    assert {"flags", "code", "versions", "machine", "threads"} <= set(page["cells"][0]["parts"])


def test_a_second_call_runs_nothing_again_and_prints_the_same(bench):
    first = bench(TWO, "--json")[1]
    code, second, err = bench(TWO, "--json")
    assert (code, second, err) == (0, first, "")


def test_a_failed_cell_is_a_row_with_its_cause_and_exits_with_1(bench):
    code, out, _ = bench(TWO + "fails = 2\n")
    assert code == 1
    assert "two, seed 0 failed: RuntimeError: iteration 2 does not work" in out


def test_a_cell_with_inconsistent_sums_is_an_error(bench):
    code, out, _ = bench(TWO + "closes = false\n")
    assert code == 1
    assert "two: the sums of sampled rows and of their outcomes do not match" in out


def test_a_used_up_budget_is_reported_with_a_remedy(bench):
    code, out, _ = bench(TWO, "--budget", "0s")
    assert code == 0
    assert "the budget of 0s is used up: the same command continues" in out
    assert bench(TWO)[0] == 0


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("25m", 1500), ("1h30m", 5400), ("0.5h", 1800)])
def test_durations_are_read(text, seconds):
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["", "25", "m", "-3m", "3 m", "3d"])
def test_an_invalid_duration_is_refused(bench, text):
    code, _, err = bench(TWO, f"--budget={text}")
    assert code == 2
    assert "--budget is not a duration" in err


def test_the_files_of_a_suite_are_made_once(tmp_path):
    maker = tmp_path / "maker.py"
    maker.write_text("import sys, pathlib\n(pathlib.Path(sys.argv[1]) / 'file').write_text('once')\n")
    path = tmp_path / "mine.toml"
    path.write_text('[suite]\nmake = "maker.py"\n[base]\nalgorithm = "grpo"\nmodel = "{made}/model"\n')
    suite = read_suite(path)
    (tmp_path / "out").mkdir()
    maker.write_text("raise SystemExit('no disk')")
    with pytest.raises(PlanError, match="maker.py, which generates") as refused:
        made(suite, tmp_path / "out")
    assert refused.value.problems[0].found == "no disk"
    maker.write_text("import sys, pathlib\n(pathlib.Path(sys.argv[1]) / 'file').write_text('once')\n")
    place = made(suite, tmp_path / "out")
    assert (place / "file").read_text() == "once"
    maker.write_text("raise SystemExit('not again')")
    assert made(suite, tmp_path / "out") == place


def test_trust_and_gates_from_the_command_line(bench):
    gate = '[[gate]]\nmetric = "seconds"\ncell = "one"\n'
    for number in range(5):
        code, out, _ = bench(
            TWO.replace("seconds = 0.5", f"seconds = 0.5{number}") + gate, "--out", f"kept/{number}"
        )
        assert code == 0
        assert "passes without history" in out
        assert exit_code(["bench", "trust", f"kept/{number}"]) == 0
    code, out, _ = bench(TWO.replace("seconds = 0.5", "seconds = 0.9") + gate, "--out", "kept/slow")
    assert code == 1
    assert "one: seconds: 0.9 is a regression, outside of" in out
    assert exit_code(["bench", "trust"]) == 2
    assert exit_code(["bench", "learning", "schedules"]) == 2


def test_another_comparison_is_shown_and_decides_nothing(bench):
    bench(TWO, "--out", "before")
    code, out, _ = bench(
        TWO.replace("seconds = 1.0", "seconds = 2.0"), "--out", "after", "--against", "before"
    )
    assert code == 0
    assert (
        "two: 2.000 s an iteration, 1.000 in before, ratio 2.00; the measurements did not alternate"
        in " ".join(out.split())
    )
    assert bench(TWO, "--out", "never", "--against", "nowhere")[0] == 2
    assert not Path("never").exists(), "it is refused before anything runs"


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
def test_a_stopped_comparison_resumes_with_the_same_command(bench, tmp_path, number):
    """The second run sends the signal to the command, its parent."""
    system = tmp_path / "stops.py"
    system.write_text(
        COUNTING.read_text().replace(
            "        rows = []\n",
            """        rows = []
        if not (sent := self.folder.parents[2] / "sent").exists() and self.number:
            import os, signal
            sent.touch()
            os.kill(os.getppid(), signal.NUMBER)
            time.sleep(1000)
""".replace("NUMBER", number),
        )
    )
    code, out, err = bench(TWO.replace(str(COUNTING), str(system)))
    assert (code, out) == (130, "")
    assert (
        err.splitlines()[-1]
        == "stopped; the measurements so far are in bench/mine, and the same command continues"
    )
    code, out, _ = bench(TWO.replace(str(COUNTING), str(system)))
    assert code == 0
    assert "two vs one, speed: " in " ".join(out.split())
