"""A run keeps its folder, even if the working directory, the folder, its files or the model folder change."""

import json
import os
import re
import resource
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from run_faults import MODEL, at, command, content, differences, in_child, metrics, run

import rlflow
from rlflow.checkpoints.reading import load_latest
from rlflow.errors import PlanError
from rlflow.monitoring import status
from rlflow.monitoring.outputs import make_reporter
from rlflow.monitoring.reporter import Quiet
from rlflow.runs import resume

pytestmark = pytest.mark.slow  # whole runs, models or processes: each test is short, all together are not

ITERATIONS = 4


def null_run(out, name="run", **changes):
    keywords = {
        "backend": "null",
        "prompts": 4,
        "iterations": ITERATIONS,
        "save_every": 1,
        "out": str(out),
        "name": name,
    }
    return rlflow.run("grpo", **{**keywords, **changes})


@pytest.fixture(scope="module")
def wanted(tmp_path_factory):
    return content(null_run(tmp_path_factory.mktemp("wanted")).folder)


class Notes(Quiet):
    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)


def test_a_stage_that_changes_directory_harms_nothing(tmp_path, monkeypatch, wanted):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()

    def wandering():
        at("actor.generate", 1, lambda: os.chdir("elsewhere"))
        print(null_run("runs").as_json()["run"])

    assert in_child(wandering) == 0
    assert list(differences(content(tmp_path / "runs/run"), wanted)) == []
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert (tmp_path / "runs/run/final/actor/null.txt").exists()


def refused(action, tmp_path):
    """Return the message of a command that ends with 2."""
    words = [
        "run",
        "grpo",
        "--backend",
        "null",
        "--prompts",
        4,
        "--iterations",
        ITERATIONS,
        "--save-every",
        0,
        "--out",
        tmp_path / "runs",
        "--name",
        "run",
        "--quiet",
    ]
    said = command(words, tmp_path / "said", action)
    assert said.code == 2, said.err
    return said.err


def test_a_moved_folder_ends_the_run_after_a_save(tmp_path, wanted):
    there = tmp_path / "there"
    err = refused(lambda: at("actor.update", 1, lambda: (tmp_path / "runs/run").rename(there)), tmp_path)
    assert f"was moved to {there} while it ran" in err
    assert f"remedy:   rlflow resume {there}" in err
    assert load_latest(there).snapshot.iteration == 2
    found = status.read(there)
    assert (found.state, found.iteration, found.iterations) == ("failed", 2, ITERATIONS)
    resume.resume(there, {}, make_reporter(quiet=True))
    assert list(differences(content(there), wanted)) == []
    assert status.read(there).state == "done"
    assert not (tmp_path / "runs/run").exists()


def test_a_deleted_folder_ends_the_run_after_a_save(tmp_path, wanted):
    folder = tmp_path / "runs/run"
    err = refused(lambda: at("actor.update", 1, lambda: shutil.rmtree(folder)), tmp_path)
    assert f"the run's folder {folder} was deleted while it ran" in err
    assert "the state is saved as" in err
    assert load_latest(folder).snapshot.iteration == 2
    resume.resume(folder, {}, Quiet())
    found = content(folder)
    assert (found.tensors, found.state) == (wanted.tensors, wanted.state)
    assert found.metrics == wanted.metrics[1:]  # the line that waited for a file is there


def test_files_deleted_during_a_run_are_written_again(tmp_path, wanted):
    folder = tmp_path / "runs/run"

    def emptied():
        for path in folder.iterdir():
            if path.is_file():
                path.unlink()

    def deleting():
        at("actor.update", 1, emptied)
        null_run(tmp_path / "runs")

    assert in_child(deleting) == 0
    assert list(differences(content_without(folder, 1), content_without(folder, 1, wanted))) == []
    assert "settings.json was deleted from" in (folder / "notes.txt").read_text()
    assert json.loads((folder / "settings.json").read_text())["options"]["iterations"] == ITERATIONS
    resume.resume(folder, {"iterations": ITERATIONS + 1}, make_reporter(quiet=True))


def content_without(folder, lost, found=None):
    """Return the content without the metrics of the first iterations."""
    found = found or content(folder)
    return replace(found, metrics=found.metrics[-(ITERATIONS - lost) :])


def test_a_folder_of_another_run_with_the_name_is_left_alone(tmp_path):
    """The folder was moved, and a new run took its name."""
    folder, there = tmp_path / "runs/run", tmp_path / "there"

    def swapped():
        folder.rename(there)
        folder.mkdir()
        (folder / "settings.json").write_text("another's")

    assert f"was moved to {there}" in refused(lambda: at("actor.update", 2, swapped), tmp_path)
    assert (folder / "settings.json").read_text() == "another's"
    assert load_latest(there).snapshot.iteration == 3


@pytest.mark.slow
def test_a_started_run_does_not_need_its_model_folder(task, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    (folder / "stray.json").write_bytes(b"0" * (65 << 20))
    straight = run(
        "grpo", {**task, "model": str(folder)}, "straight", iterations=2, prompts=4, held_out=0, save_every=1
    ).folder
    saved = load_latest(straight).snapshot.files

    def losing():
        at("actor.update", 0, lambda: shutil.rmtree(folder))
        run("grpo", {**task, "model": str(folder)}, "lost", iterations=2, prompts=4, held_out=0, save_every=1)

    assert in_child(losing) == 0
    lost = straight.with_name("lost")
    assert list(differences(content(lost), content(straight))) == []
    assert load_latest(lost).snapshot.files == saved
    assert sorted(saved) == sorted(
        f"actor/{path.name}" for path in Path(MODEL).iterdir() if path.suffix == ".json"
    )
    one, other = (
        {path.name: path.read_bytes() for path in (each / "final/actor").iterdir()}
        for each in (lost, straight)
    )
    assert one == other
    assert (Path(MODEL) / "tokenizer.json").read_bytes() == one["tokenizer.json"]


def torn(path):
    path.write_bytes(path.read_bytes()[:-3])


DAMAGE = {
    "a torn line": (torn, 1),
    "zeros at the end": (lambda path: path.write_bytes(path.read_bytes() + bytes(40)), 0),
    "a byte that is no UTF-8": (lambda path: path.write_bytes(b"\xff\xfe\n" + path.read_bytes()), 0),
    "a number": (lambda path: path.write_bytes(b"7\n" + path.read_bytes()), 0),
    "a list": (lambda path: path.write_bytes(b"[1, 2]\n" + path.read_bytes()), 0),
    "no number": (lambda path: path.write_bytes(b'{"iteration": "x"}\n' + path.read_bytes()), 0),
    "deep nesting": (lambda path: path.write_bytes(b"[" * 100_000 + b"\n" + path.read_bytes()), 0),
    "nothing": (Path.unlink, 2),
    "a pipe": (lambda path: (path.unlink(), os.mkfifo(path)), None),
}


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """A run of two iterations."""
    return null_run(tmp_path_factory.mktemp("half"), iterations=2).folder


QUICK = ("a torn line", "a byte that is no UTF-8", "a pipe")
KINDS = [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in DAMAGE]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_resumes_despite_a_damaged_log(kind, half, tmp_path, wanted):
    """Unreadable lines stay and are counted; the lines of each iteration appear once."""
    folder = tmp_path / "run"
    shutil.copytree(half, folder)
    damage, lost = DAMAGE[kind]
    for name in ("metrics.jsonl", "samples.jsonl"):
        damage(folder / name)
    resume.resume(folder, {"iterations": ITERATIONS}, make_reporter(quiet=True))
    found = content_without_metrics(folder)
    assert found == (wanted.iteration, wanted.tensors, wanted.state)
    if lost is not None:
        assert numbers(folder) == list(range(ITERATIONS))[: 2 - lost] + [2, 3]


def numbers(folder):
    """Return the iterations with metrics, from the readable lines."""
    path = folder / "metrics.jsonl"
    lines = path.read_bytes().splitlines() if path.is_file() else ()
    return [json.loads(line)["iteration"] for line in lines if re.match(rb'\{"iteration": [0-9]', line)]


def content_without_metrics(folder):
    saved = load_latest(folder).snapshot
    return saved.iteration, saved.tensors, saved.state


READ = (
    "metrics.jsonl",
    "status.json",
    "notes.txt",
    "settings.json",
    "bounds.txt",
    "timeline.json",
    "identity.json",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", READ)
def test_no_command_waits_for_a_pipe_in_a_runs_folder(name, half, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(half, folder)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    assert command(["runs", tmp_path], tmp_path / "said").code == 0
    assert command(["show", folder], tmp_path / "said").code == 0
    assert command(["watch", folder, "--once"], tmp_path / "said").code == 0


def test_resume_needs_no_graph_file_if_the_checkpoint_has_the_graph(half, tmp_path):
    folder, said = tmp_path / "run", Notes()
    shutil.copytree(half, folder)
    (folder / "graph.msgpack").write_bytes(b"\0")
    settings = json.loads((folder / "settings.json").read_text())
    (folder / "settings.json").write_text(json.dumps({**settings, "hp": {**settings["hp"], "clip": 0.5}}))
    with pytest.raises(PlanError, match=r"without graph\.msgpack the difference is unknown"):
        resume.resume(folder, {"iterations": ITERATIONS}, said)
    (folder / "settings.json").write_text(json.dumps(settings))
    resume.resume(folder, {"iterations": ITERATIONS}, said)
    assert any("graph.msgpack cannot be read" in note for note in said.notes)
    assert (folder / "graph.msgpack").read_bytes() == (half / "graph.msgpack").read_bytes()


@pytest.mark.parametrize("lacking", ["file", "flow", "values", "hp"])
def test_incomplete_settings_are_reported(lacking, half, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(half, folder)
    settings = json.loads((folder / "settings.json").read_text())
    for value in (None, 7):
        (folder / "settings.json").write_text(json.dumps({**settings, lacking: value}))
        with pytest.raises(PlanError, match=f"no {lacking}"):
            resume.resume(folder, {}, Quiet())


@pytest.mark.slow
@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b"[" * 100_000])
def test_invalid_settings_are_reported(content, half, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(half, folder)
    (folder / "settings.json").write_bytes(content)
    with pytest.raises(PlanError):
        resume.resume(folder, {}, Quiet())


def test_foreign_files_in_checkpoints_are_reported_and_ignored(half, tmp_path, wanted):
    folder, said = tmp_path / "run", Notes()
    shutil.copytree(half, folder)
    for step in (folder / "checkpoints").glob("step-*"):
        (step / ".DS_Store").write_bytes(b"\0")
    resume.resume(folder, {"iterations": ITERATIONS}, said)
    assert any(".DS_Store" in note and "ignored" in note for note in said.notes)
    assert list(differences(content(folder), wanted)) == []


def test_a_full_disk_during_resume_repeats_no_iteration(half, tmp_path, wanted):
    """The disk has room again from the third iteration on. All files are complete."""
    folder = tmp_path / "run"
    shutil.copytree(half, folder)
    shutil.rmtree(folder / "checkpoints/step-00000002")  # so that the run repeats an iteration

    def full():
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        at("actor.update", 2, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits))
        resume.resume(folder, {"iterations": ITERATIONS}, make_reporter(quiet=True))

    assert in_child(full) == 0
    assert [line["iteration"] for line in metrics(folder)] == list(range(ITERATIONS))
    assert list(differences(content(folder), wanted)) == []
    assert [
        path.name for path in folder.iterdir() if path.name.startswith(".") or path.suffix == ".aside"
    ] == []
    assert status.read(folder).state == "done"
    assert json.loads((folder / "settings.json").read_text())["options"]["iterations"] == ITERATIONS


def test_settings_find_data_and_rewards_from_the_start_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = "".join(json.dumps({"prompt": f"{n}?", "answer": str(n)}) + "\n" for n in range(20))
    for folder in ("", "elsewhere"):
        (tmp_path / folder).mkdir(exist_ok=True)
    Path("sums.jsonl").write_text(rows)
    Path("rules.py").write_text("def score(completion):\n    return 1.0\n")
    first = null_run("runs", iterations=1, data="sums.jsonl", reward="rules.py:score:0.5").folder
    monkeypatch.chdir(tmp_path / "elsewhere")
    resume.resume(Path("../runs/run"), {"iterations": 2}, make_reporter(quiet=True))
    assert load_latest(first).snapshot.iteration == 2


def test_a_pattern_of_data_and_a_name_on_the_hub_keep_their_meaning_in_another_folder(tmp_path, monkeypatch):
    (tmp_path / "start" / "parts").mkdir(parents=True)
    (tmp_path / "start" / "parts" / "a.jsonl").touch()
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    pin = f"org/name@{'a' * 40}"
    values = {"data": ["g=parts/*.jsonl:0.5", f"{pin}:main/test:0.5"], "model": pin}
    start = str(tmp_path / "start")
    assert resume.anchor_paths(values, start) == {
        "data": (f"g={start}/parts/*.jsonl:0.5", f"{pin}:main/test:0.5"),
        "model": pin,
    }
