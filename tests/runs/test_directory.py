import json
import math

import pytest
import torch

from rlflow.batch import Axis, Batch, Data
from rlflow.columns import text
from rlflow.errors import PlanError
from rlflow.execution.executor import Outcome
from rlflow.execution.summary import sample_rows
from rlflow.runs import directory
from rlflow.runs.directory import Records
from rlflow.spans import Span

OUTSIDE = ("../up", "/abs", "a/b", "..", ".", "", "a\0b", "a\nb", "~", "-x", "a b", "%2e%2e/x")


def test_runs_are_numbered_and_never_share_a_folder(tmp_path):
    assert [directory.create(tmp_path, None, "ppo").name for _ in range(3)] == ["ppo-1", "ppo-2", "ppo-3"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_run_name_stays_inside_its_folder(tmp_path, name):
    with pytest.raises(PlanError, match="single folder name"):
        directory.create(tmp_path / "runs", name, "ppo")
    assert not list(tmp_path.rglob("*x*"))


def test_a_taken_name_is_refused_and_left_alone(tmp_path):
    kept = directory.create(tmp_path, "mine", "ppo") / "file"
    kept.write_text("content")
    with pytest.raises(PlanError, match="exists"):
        directory.create(tmp_path, "mine", "ppo")
    assert kept.read_text() == "content"


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match="no run can be written|exists"):
        directory.create(tmp_path / "file" / "runs", None, "ppo")


def test_records_are_plain_json_with_null_for_what_is_not_finite(tmp_path):
    records = Records(tmp_path)
    records.metrics(3, {"a/loss": 1.5, "a/bad": math.nan})
    records.samples(3, [{"prompt": "\x1b[31mred"}])
    records.timeline(3, Outcome(spans=[Span("a", "model", 10.0, 10.5, ("b",)), Span("b", "cpu", 9.0, 9.25)]))
    records.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"iteration": 3, "a/loss": 1.5, "a/bad": None}
    assert "\x1b" not in (tmp_path / "samples.jsonl").read_text()
    events = [event for event in json.loads((tmp_path / "timeline.json").read_text()) if event["ph"] == "X"]
    assert [(event["name"], event["ts"], event["dur"]) for event in events] == [("b", 0.0, 2.5e5), ("a", 1e6, 5e5)]
    assert events[0]["tid"] != events[1]["tid"]


def test_a_full_disk_is_said_once_and_ends_nothing(tmp_path):
    (tmp_path / "timeline.json").symlink_to("/dev/full")
    said = []
    records = Records(tmp_path, 0, said.append)
    for iteration in range(3):
        records.metrics(iteration, {"a": 1.0})
        records.timeline(iteration, Outcome(spans=[Span("a", "model", 10.0, 10.5)]))
    records.close()
    assert said == ["timeline.json cannot be written, the run goes on: No space left on device"]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_what_bounded_a_run_is_kept_unless_the_disk_is_full(tmp_path):
    said = []
    records = Records(tmp_path, 0, said.append)
    records.bounds("a line", {"bound": 1.0})
    assert ((tmp_path / "bounds.txt").read_text(), json.loads((tmp_path / "bounds.json").read_text())) == ("a line\n", {"bound": 1.0})
    (tmp_path / "bounds.txt").unlink()
    (tmp_path / "bounds.txt").symlink_to("/dev/full")
    records.bounds("a line", {"bound": 2.0})
    records.close()
    assert said == ["bounds.txt cannot be written, the run goes on: No space left on device"]
    assert json.loads((tmp_path / "bounds.json").read_text()) == {"bound": 2.0}


def test_sample_rows_pair_each_response_with_its_own_prompt():
    prompts = Batch.of(prompt=["p0", "p1"], answer=["a0", "a1"])
    rows = Axis.repeat(prompts.axis, 2)
    completion = Data(text, ("c00", "c01", "c10", "c11"))
    scores = Batch(rows, {"scores": Batch.of(scores=[0.0, 1.0, math.nan, 1.0]).data["scores"]})
    records = {"prompt": prompts, "completion": Batch(rows, {"completion": completion}), "scores": scores}
    records = {name: batch.select(name) for name, batch in records.items()}
    shown = sample_rows(records, 3)
    paired = [(row["prompt"], row["completion"], row["scores"]) for row in shown]
    assert paired == [("p0", "c00", 0.0), ("p0", "c01", 1.0), ("p1", "c10", None)]
    assert torch.equal(rows.slots, torch.tensor([0, 0, 1, 1]))
