"""The files of a run that other programs read."""

import json

from keyed import figures

from rlflow.monitoring import status
from rlflow.monitoring.recorder import Recorder


def test_the_state_follows_the_run(info, metrics, stages):
    recorder, said = Recorder(print), []
    recorder.start(info)
    recorder.iteration(4, metrics, [], stages)
    recorder.evaluation(5, figures({"evaluation/sampled": 0.5}))
    found = status.read(info.folder)
    said.append((found.state, found.iteration, found.iterations, found.evaluation))
    recorder.close("failed", "broke \x1b[31m here")
    recorder.close("done")
    found = status.read(info.folder)
    assert said == [("running", 5, 12, {"evaluation/sampled": 0.5})]
    assert (found.state, found.error, found.flow) == ("failed", "broke \\x1b[31m here", "ppo")


def test_not_every_short_iteration_is_written(info, metrics, stages):
    now = [0.0]
    recorder, seen = Recorder(print, clock=lambda: now[0]), []
    recorder.start(info)
    for number in range(10):
        now[0] += 0.25
        recorder.iteration(number, metrics, [], stages)
        seen.append(status.read(info.folder).iteration)
    assert seen == [0, 0, 0, 4, 4, 4, 4, 8, 8, 8]
    recorder.close("interrupted")
    assert status.read(info.folder).iteration == 10


def test_notes_before_the_folder_are_kept_and_after_the_end_dropped(info, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "canary-5f3a")
    recorder = Recorder(print)
    recorder.note("first canary-5f3a")
    recorder.start(info)
    recorder.note("second\nwith a line\x1b")
    recorder.close("done")
    recorder.note("summary")
    lines = (info.folder / "notes.txt").read_text().splitlines()
    assert [line.split("  ", 1)[1] for line in lines] == ["first ***", "second", "with a line\\x1b"]
    assert json.loads((info.folder / "status.json").read_text())["state"] == "done"


def test_an_unwritable_state_is_reported_once(info, metrics, stages):
    said = []
    recorder = Recorder(said.append)
    for path in sorted(info.folder.rglob("*"), reverse=True):
        path.unlink()
    info.folder.rmdir()
    recorder.start(info)
    recorder.iteration(0, metrics, [], stages)
    recorder.close("done")
    assert len(said) == 1
    assert "cannot be written" in said[0]
