"""Runs whose flow defines its own evaluation."""

import json
import shutil
from pathlib import Path

import pytest
from keyed import figures

import rlflow
from rlflow.monitoring.history import summarised
from rlflow.monitoring.plain_display import accuracy
from rlflow.monitoring.reporter import Quiet
from rlflow.runs.final import summary
from rlflow.runs.resume import resume

pytestmark = pytest.mark.slow  # whole runs, models or processes: each test is short, all together are not

FLOWS = Path(__file__).parent / "flows" / "judged.py"
TIMES = ("seconds", "response/tokens_per_second")


def run_flow(task, name, **keywords):
    return rlflow.run(
        f"{FLOWS}::{name}", **task | {"eval_every": 1, "save_every": 0, "threads": 1} | keywords
    )


def lines(folder):
    """Return the lines of evaluations and of iterations, without times."""
    every = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    every = [{name: value for name, value in line.items() if name not in TIMES} for line in every]
    return [line for line in every if "evaluation/sampled" in line], [
        line for line in every if "evaluation/sampled" not in line
    ]


def answers(folder):
    return [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_body_like_the_default_evaluation_gives_its_figures(
    task,
):
    usual, greedy = run_flow(task, "usual"), run_flow(task, "greedy")
    (judged, trained), (own, beside) = lines(usual.folder), lines(greedy.folder)
    assert [line["evaluation/greedy"] for line in judged] == [line["evaluation/sampled"] for line in own]
    assert [line["evaluation/score"] for line in own] == [line["evaluation/sampled"] for line in own]
    assert not any("evaluation/greedy" in line for line in own)
    assert len(own) == 3
    assert trained == beside
    assert (usual.after.greedy, None) == (greedy.after.sampled, greedy.after.greedy)


@pytest.mark.slow
def test_equal_weights_have_equal_evaluations(task):
    still = run_flow(task, "two", lr=0.0, iterations=3)
    own, trained = lines(still.folder)
    assert len({json.dumps({**line, "iteration": 0}) for line in own}) == 1
    assert len({json.dumps({**line, "iteration": 0}) for line in trained}) == 3
    told = answers(still.folder)
    assert [one["before"] for one in told] == [one["after"] for one in told]
    other = answers(run_flow(task, "two", lr=0.0, iterations=1, seed=7).folder)
    assert [one["prompt"] for one in other] == [one["prompt"] for one in told]
    assert [one["before"] for one in other] != [one["before"] for one in told]


@pytest.mark.slow
def test_a_resumed_run_evaluates_like_an_uninterrupted_one(task, tmp_path):
    whole = run_flow(task, "two", iterations=3, save_every=1, keep=9)
    cut = tmp_path / "cut"
    shutil.copytree(whole.folder, cut)
    shutil.rmtree(cut / "final")
    for newer in [path for path in (cut / "checkpoints").iterdir() if path.name != "step-00000001"]:
        newer.unlink() if newer.is_symlink() or newer.is_file() else shutil.rmtree(newer)
    resume(cut, {}, Quiet())
    assert lines(cut) == lines(whole.folder)
    assert (cut / "answers.jsonl").read_text() == (whole.folder / "answers.jsonl").read_text()


def test_dropped_rows_are_not_counted_and_none_is_no_error(task):
    result = run_flow(task, "nothing", iterations=1)
    own, _ = lines(result.folder)
    assert [line["evaluation/sampled"] for line in own] == [0.0, 0.0]
    assert not any("evaluation/score" in line for line in own)
    assert [(one["before"], one["after"]) for one in answers(result.folder)] == [("", "")] * 10


def test_mean_scores_are_shown_next_to_shares(task):
    result = run_flow(task, "halves", iterations=1)
    own, _ = lines(result.folder)
    assert [(line["evaluation/sampled"], line["evaluation/score"]) for line in own] == [(0.0, 0.5)] * 2
    del own[0]["iteration"]
    assert (
        accuracy(3, figures(own[0]), 16)
        == "held-out accuracy after 3 iterations: sampled 0.0% of 16, mean score 0.5"
    )
    assert "mean score" in summary(result)
    assert summarised(result.folder).evaluation["evaluation/score"] == 0.5


def test_a_body_needs_held_out_prompts(task):
    assert lines(run_flow(task, "two", held_out=0).folder)[0] == []


def test_an_evaluation_of_several_sources_shows_each_share(task, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text(
        "".join(json.dumps({"prompt": f"{n} - 1 =", "answer": str(n - 1)}) + "\n" for n in range(2, 42))
    )
    result = run_flow(task, "two", iterations=1, data=(f"sums={task['data']}", f"less={other}"))
    own, _ = lines(result.folder)
    assert {"evaluation/sampled/sums", "evaluation/sampled/less"} < own[0].keys()
