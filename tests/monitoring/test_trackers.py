"""Trackers through their own libraries: their own readers read the written data back."""

import importlib
import io
import json
import os
import signal
import subprocess
import sys
import threading

import pytest
from keyed import figures

from rlflow.errors import PlanError
from rlflow.monitoring import trackers
from rlflow.monitoring.outputs import make_reporter
from rlflow.monitoring.plain_display import Plain
from rlflow.monitoring.reporter import Several
from rlflow.monitoring.trackers import Background, markdown
from rlflow.monitoring.wandb_runs import has_key
from rlflow.processes.watchdog import launcher

SAMPLES = [
    {"prompt": "2 + | 2", "completion": "<b>`4`</b>\nnext", "scores": 1.0},
    {"prompt": "1 + 1", "completion": "2", "scores": None},
]
NAMES = {
    "critic/score/mean": 0.625,
    "actor/pg_clipfrac": 0.125,
    "response_length/mean": 17.5,
    "own/number": 7.0,
    "timing_s/actor.update": 0.5,
}


def report(reporter, info, metrics, stages, iterations=3):
    reporter.start(info)
    reporter.evaluation(0, figures({"evaluation/sampled": 0.25}))
    for number in range(iterations):
        reporter.iteration(number, metrics, SAMPLES, stages)
    reporter.close("done")


@pytest.fixture(autouse=True)
def no_account(monkeypatch, tmp_path):
    """Hide the keys, servers and settings of this machine's user."""
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def test_tensorboard_reads_the_tracked_data(info, metrics, stages):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = io.StringIO()
    report(make_reporter(track=["tensorboard"], stream=out), info, metrics, stages)
    events = EventAccumulator(str(info.folder / "tensorboard"))
    events.Reload()
    for name, value in NAMES.items():
        assert [(event.step, event.value) for event in events.Scalars(name)] == [
            (1, value),
            (2, value),
            (3, value),
        ], name
    assert [(event.step, event.value) for event in events.Scalars("val/accuracy")] == [(0, 0.25)]
    assert "actor/pg_loss" not in events.Tags()["scalars"]  # it was never finite
    table = events.Tensors("samples/text_summary")[0].tensor_proto.string_val[0].decode()
    assert table.splitlines()[2] == "| 0 | 2 + &#124; 2 | &lt;b&gt;&#96;4&#96;&lt;/b&gt; next | 1.0 |"
    assert "tensorboard --logdir" in out.getvalue()


@pytest.mark.slow
def test_mlflow_reads_the_tracked_data(info, metrics, stages):
    mlflow = importlib.import_module("mlflow")

    report(make_reporter(quiet=True, track=["mlflow"]), info, metrics | figures({"odd@name#2": 1.0}), stages)
    client = mlflow.MlflowClient(tracking_uri=(info.folder.parent / "mlruns").as_uri())
    [run] = client.search_runs([client.get_experiment_by_name("ppo").experiment_id])
    assert (run.info.run_name, run.info.status) == ("ppo-1", "FINISHED")
    assert run.data.params == {"flow": "ppo", "hp.clip": "0.2", "options.seed": "0"}
    for name, value in {**NAMES, "odd_name_2": 1.0}.items():
        history = client.get_metric_history(run.info.run_id, name)
        assert [(metric.step, metric.value) for metric in history] == [(1, value), (2, value), (3, value)]
    path = client.download_artifacts(run.info.run_id, "samples.json", str(info.folder))
    with open(path) as file:
        table = json.load(file)
    assert table["columns"] == ["iteration", "prompt", "completion", "scores"]
    assert table["data"][0] == [0, "2 + | 2", "<b>`4`</b>\nnext", 1.0]
    assert json.loads(run.data.tags["mlflow.loggedArtifacts"]) == [{"path": "samples.json", "type": "table"}]


WANDB = """
import json, sys
from pathlib import Path
from rlflow.author.figures import Figure, Of
from rlflow.monitoring.outputs import make_reporter
from rlflow.monitoring.reporter import RunInfo
run = RunInfo(Path(sys.argv[1]), "ppo", 12, {"hp": {"clip": 0.2}, "my_token": "canary-in-settings"})
reporter = make_reporter(track=["wandb"])
reporter.start(run)
for number in range(3):
    metrics = {Figure(Of.REWARD, "mean", "reward", "reward"): 0.5, Figure(Of.STATE, "bad"): float("inf")}
    reporter.iteration(number, metrics, json.loads(sys.argv[2]), {})
reporter.close("done")
"""


@pytest.mark.slow
def test_wandb_leaves_an_offline_run_without_secrets(info):
    """Runs in a process of its own, because the library starts a service that lives as long as its
    process."""
    words = [
        sys.executable,
        "-c",
        WANDB,
        str(info.folder),
        json.dumps(SAMPLES),
        "--password=canary-on-the-command-line",
    ]
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "HF_TOKEN": "canary-in-environment"},
    )
    assert done.returncode == 0, done.stderr
    assert "wandb: offline; wandb sync" in done.stdout
    [file] = (info.folder / "wandb").glob("offline-run-*/run-*.wandb")
    kept = b"".join(path.read_bytes() for path in (info.folder / "wandb").rglob("*") if path.is_file())
    assert b"critic/score/mean" in file.read_bytes()
    assert b"2 + | 2" in kept
    assert b"canary" not in kept


class Failing:
    """A tracker whose ``stage`` fails."""

    def __init__(self, stage, error=None):
        self.stage, self.error, self.calls = stage, error, []

    def _called(self, name):
        self.calls.append(name)
        if name == self.stage:
            raise self.error

    def start(self, run, settings):
        self._called("start")
        return "somewhere"

    def log(self, step, metrics):
        self._called("log")

    def table(self, step, rows):
        self._called("table")

    def close(self, state):
        self._called("close")


@pytest.mark.parametrize("stage", ["start", "log", "table", "close"])
@pytest.mark.parametrize("error", [OSError("disk full"), SystemExit("no account")])
def test_a_failing_tracker_is_reported_once_and_stops_nothing(info, metrics, stages, stage, error):
    out = io.StringIO()
    view, tracker = Plain(out), Failing(stage, error)
    report(Several(view, [Background("mine", tracker, view.note)]), info, metrics, stages, 12)
    assert out.getvalue().count("tracker mine failed and is not used any more") == 1
    assert tracker.calls.index(stage) == len(tracker.calls) - 1  # it gets no further calls
    assert "12/12" in out.getvalue()


def test_a_hanging_tracker_delays_neither_the_run_nor_its_end(info, metrics, stages, monkeypatch):
    monkeypatch.setitem(trackers.CLOSE_SECONDS, "done", 0.05)
    out, free = io.StringIO(), threading.Event()
    tracker = Failing("none")
    tracker.log = lambda step, metrics: free.wait()
    view = Plain(out)
    report(Several(view, [Background("mine", tracker, view.note)]), info, metrics, stages, 3)
    free.set()
    assert "failed and is not used any more: it was not finished" in out.getvalue()


def test_a_signal_ends_the_final_wait_for_a_tracker(info, monkeypatch):
    monkeypatch.setattr(launcher, "_at_once", False)
    said, free, tracker, handler = [], threading.Event(), Failing("none"), signal.getsignal(signal.SIGTERM)

    def close(state):
        while signal.getsignal(signal.SIGTERM) == handler:
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        free.wait()

    tracker.close = close
    background = Background("mine", tracker, said.append)
    background.start(info)
    background.close("done")
    free.set()
    assert "it was not finished when the run was stopped" in said[-1]
    assert launcher.leaves_at_once()


def test_a_tracker_that_retries_for_long_is_reported_once(info, monkeypatch):
    monkeypatch.setattr(trackers, "SLOW_SECONDS", 0.01)
    said, began, free, tracker = [], threading.Event(), threading.Event(), Failing("none")
    tracker.start = lambda run, settings: ""
    tracker.log = lambda step, metrics: began.set() or free.wait()
    background = Background("mine", tracker, said.append)
    background.start(info)
    background.evaluation(0, {})
    began.wait()
    while not said:
        background.evaluation(1, {})
    background.evaluation(2, {})
    free.set()
    background.close("done")
    assert sum("has not answered" in line for line in said) == 1


def test_a_tracker_that_falls_behind_is_dropped(info):
    said, free, tracker = [], threading.Event(), Failing("none")
    tracker.start = lambda run, settings: str(free.wait())
    background = Background("mine", tracker, said.append)
    background.start(info)
    for number in range(trackers.WAITING + 9):
        background.evaluation(number, {})
    free.set()
    assert said == [
        f"tracker mine failed and is not used any more: {trackers.WAITING} records are waiting for it"
    ]


def test_unknown_and_missing_trackers_are_refused_before_the_run(monkeypatch):
    with pytest.raises(PlanError, match="nearest:  tensorboard"):
        make_reporter(track=["tensorbord"])
    for name in trackers.NAMES:
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(PlanError, match=r"pip install 'rlflow-dag\[trackers\]'"):
            make_reporter(track=[name])


def test_no_tracker_is_imported_unless_requested():
    code = "import sys; from rlflow.monitoring.outputs import make_reporter; make_reporter(); "
    code += "print({'wandb', 'mlflow', 'tensorboard', 'torch'} & set(sys.modules))"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "set()\n"
    )


def test_a_key_is_found_in_the_places_of_wandb(monkeypatch, tmp_path):
    assert not has_key()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".netrc").write_text("machine api.wandb.ai login user password 0123456789\n")
    (tmp_path / "home" / ".netrc").chmod(0o600)
    assert has_key()
    monkeypatch.setenv("WANDB_BASE_URL", "https://elsewhere.example")
    assert not has_key()
    monkeypatch.setenv("WANDB_API_KEY", "0123456789")
    assert has_key()


def test_a_markdown_table_has_a_line_per_row():
    assert markdown([{"a": "x\r\ny|z\\"}, {"b": None}]).splitlines() == [
        "| a | b |",
        "| --- | --- |",
        "| x y&#124;z&#92; |  |",
        "|  |  |",
    ]
