"""The files that a run writes during its iterations."""

import json
import math

import torch
from keyed import figures

from rlflow.author.axis import Axis
from rlflow.author.batch import Batch, Data
from rlflow.author.columns import text
from rlflow.compiler.spans import Span
from rlflow.execution.iteration_outcome import Outcome
from rlflow.execution.summary import sample_rows
from rlflow.runs.records import Records


def test_records_are_plain_json_with_null_for_non_finite_numbers(tmp_path):
    records = Records(tmp_path)
    records.metrics(3, figures({"a/loss": 1.5, "a/bad": math.nan}))
    records.samples(3, [{"prompt": "\x1b[31mred"}])
    records.traffic(3, {})
    records.timeline(3, Outcome(spans=[Span("a", "model", 10.0, 10.5, ("b",)), Span("b", "cpu", 9.0, 9.25)]))
    records.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {
        "iteration": 3,
        "a/loss": 1.5,
        "a/bad": None,
    }
    assert "\x1b" not in (tmp_path / "samples.jsonl").read_text()
    assert not (tmp_path / "traffic.jsonl").exists()  # one process transfers no bytes
    events = [event for event in json.loads((tmp_path / "timeline.json").read_text()) if event["ph"] == "X"]
    assert [(event["name"], event["ts"], event["dur"]) for event in events] == [
        ("b", 0.0, 2.5e5),
        ("a", 1e6, 5e5),
    ]
    assert events[0]["tid"] != events[1]["tid"]


def write_records(records, iterations):
    for number in iterations:
        records.metrics(number, figures({"loss": number / 2}))
        records.samples(number, [{"prompt": f"{number}?"}] * 2)
        records.traffic(number, {"columns": 3 * number, "weights": 0})
        records.timeline(
            number,
            Outcome(
                spans=[Span("a", "model", number, number + 0.5), Span("b", "cpu", number + 0.5, number + 1)]
            ),
        )
        records.metrics(number + 1, figures({"evaluation/sampled": 0.5}))
        records.traffic(number + 1, {"evaluation/columns": 7})


def test_a_repeated_iteration_is_written_once(tmp_path):
    folders = [tmp_path / "straight", tmp_path / "again"]
    for folder, done in zip(folders, (((0, 1, 2),), ((0, 1), (1, 2), (2,))), strict=True):
        folder.mkdir()
        records = Records(folder)
        for iterations in done:
            records.back_to(iterations[0])
            write_records(records, iterations)
        records.close()
    one, two = ({path.name: path.read_text() for path in folder.iterdir()} for folder in folders)
    ran, again = (
        [
            (event["args"]["iteration"], event["name"])
            for event in json.loads(each.pop("timeline.json"))
            if event["ph"] == "X"
        ]
        for each in (one, two)
    )
    assert one == two
    assert again == ran == [(number, name) for number in range(3) for name in ("a", "b")]


def test_an_unwritable_log_is_reported_once_and_stops_nothing(tmp_path):
    (tmp_path / "timeline.json").mkdir()
    said = []
    records = Records(tmp_path, 0, said.append)
    for iteration in range(3):
        records.metrics(iteration, figures({"a": 1.0}))
        records.timeline(iteration, Outcome(spans=[Span("a", "model", 10.0, 10.5)]))
    records.close()
    assert said == ["timeline.json cannot be written: it is not a regular file; the run continues"]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_columns_of_samples_have_one_order(tmp_path):
    records = Records(tmp_path)
    records.samples(0, [{"b": 1, "a": 2}, {"a": 2, "b": 1}])
    records.close()
    assert (tmp_path / "samples.jsonl").read_text() == '{"iteration": 0, "a": 2, "b": 1}\n' * 2


def test_the_bound_of_a_run_is_kept_if_it_can_be_written(tmp_path):
    said = []
    records = Records(tmp_path, 0, said.append)
    records.bounds("a line", {"bound": 1.0})
    assert ((tmp_path / "bounds.txt").read_text(), json.loads((tmp_path / "bounds.json").read_text())) == (
        "a line\n",
        {"bound": 1.0},
    )
    (tmp_path / "bounds.txt").unlink()
    (tmp_path / "bounds.txt").mkdir()
    records.bounds("another line", {"bound": 2.0})
    records.close()
    assert said == ["bounds.txt cannot be written: Is a directory; the run continues"]
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
