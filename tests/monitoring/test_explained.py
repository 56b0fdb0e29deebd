"""`rlflow explain` of a folder: findings, funnel, time, and the line in other views that points to it."""

import json

import pytest

from rlflow.cli.watch import explain_run
from rlflow.monitoring.explained import as_json, explanation, pointer


@pytest.fixture
def folder(tmp_path):
    """A run of four iterations in which many rewards are missing."""
    (tmp_path / "settings.json").write_text(
        json.dumps({"flow": "grpo", "options": {"iterations": 4, "backend": "local"}})
    )
    lines = [
        {"iteration": number, "reward/missing_rate": rate, "funnel/rows_sampled": 8, "funnel/rows_used": 3}
        for number, rate in enumerate((0.1, 0.5, 0.6, 0.7))
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, lines[-1]]))
    return tmp_path


def test_findings_come_first_then_the_funnel_then_the_time(folder):
    (folder / "bounds.txt").write_text("a table\nan iteration took 1 s\ncritical path: a\nbusy: model 99%\n")
    head, finding, *rest = explanation(folder)
    assert head == f"{folder.name}: grpo, unknown, 4 of 4 iterations"
    assert finding.startswith(
        "alarm: 65% of the rewards are missing, and their rows are skipped since iteration 1: read "
        "the metrics missing_*"
    )
    assert rest == [
        "the last iteration:",
        "  rows: 8 sampled → 3 used",
        "time:",
        "  an iteration took 1 s",
        "  critical path: a",
        "  busy: model 99%",
    ]


def test_a_running_run_has_no_bounds_and_a_learning_run_no_finding(folder):
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({"iteration": i, "reward/missing_rate": 0.0}) + "\n" for i in range(4))
    )
    assert explanation(folder)[1:] == [
        "learning: none of the rules finds a problem",
        "time: its limit is known when the run has ended",
    ]
    assert pointer(folder) is None


def test_a_run_that_has_just_begun_is_reported_as_such(folder):
    (folder / "metrics.jsonl").write_text('{"iteration": 0, "reward/missing_rate": 1.0}\n')
    assert explanation(folder)[1] == "learning: no findings, since the run has fewer than 3 iterations"


def test_other_views_point_to_explain_if_there_is_an_alarm(folder):
    assert pointer(folder, "runs/x") == (
        "alarm: 65% of the rewards are missing, and their rows are skipped; for details: rlflow explain runs/x"
    )


def test_json_has_the_same_content_in_one_line(folder, capsys):
    (folder / "bounds.json").write_text('{"seconds": 1.0}')
    assert explain_run(str(folder), True) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == as_json(folder)
    assert said["bounds"] == {"seconds": 1.0}
    [finding] = said["findings"]
    assert (finding["name"], finding["alarm"], finding["since"]) == ("missing", True, 1)
    assert finding["evidence"] == {"missing": pytest.approx(0.65)}
    assert explain_run(str(folder), False) == 0
    assert "alarm: 65%" in capsys.readouterr().out
