"""A run killed at any call that changes its folder either resumes to the same end as the undisturbed run, or
left no run."""

import json
import os
import random
import shutil
import signal
import threading
from functools import partial

import faults
import powerloss
import pytest
from run_faults import content, differences, in_child, resumed

import rlflow
from rlflow.checkpoints.reading import load_latest
from rlflow.compiler.graph import wire
from rlflow.errors import PlanError
from rlflow.monitoring import status
from rlflow.monitoring.outputs import make_reporter
from rlflow.runs import resume

pytestmark = pytest.mark.slow  # whole runs, models or processes: each test is short, all together are not

ITERATIONS = 3
DRAWN = 5  # places to kill a run at, outside of the tests that try each place
WHOLE = ("settings.json", "identity.json", "graph.json", "status.json", "bounds.json")


def null_run(out, name="cut", **changes):
    keywords = {
        "backend": "null",
        "prompts": 4,
        "iterations": ITERATIONS,
        "save_every": 1,
        "out": str(out),
        "name": name,
    }
    return rlflow.run("grpo", **{**keywords, **changes})


def killed_at(point, root, action):
    """Run an action in a child and kill it before its n-th change below ``root``; if that change is a write
    and n is odd, kill it within the write. Return the exit status."""

    def dying():
        with faults.watching(*faults.below(root, faults.dying_at(point))):
            action()

    return in_child(dying)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The undisturbed run, and the number of changes it makes in its folder."""
    out, calls = tmp_path_factory.mktemp("straight"), []
    with faults.watching(*faults.below(out, lambda name, args: calls.append(name))):
        folder = null_run(out, "straight").folder
    return content(folder), len(calls)


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory):
    """A run with iterations left; tests resume copies of it."""
    return null_run(tmp_path_factory.mktemp("begun"), iterations=2).folder


def check_end(folder, wanted):
    """Resume the run if it had not ended; check that its end is equal and that no incomplete file is left."""
    ended = status.read(folder)
    if (ended.state, ended.iterations) != ("done", ITERATIONS):
        assert resumed(folder, iterations=ITERATIONS) == 0
    assert list(differences(content(folder), wanted)) == []
    assert [
        path.name
        for path in (*folder.iterdir(), *(folder / "checkpoints").iterdir())
        if path.name.startswith(".")
    ] == []
    assert (
        folder / "final/actor/null.txt"
    ).read_text() == f"{wanted.iteration} optimizer steps of no model\n"
    assert (folder / "answers.jsonl").exists()
    assert status.read(folder).state == "done"


def check_killed(folder, wanted):
    """Check that the files of a killed run are complete. Return True if the run could be resumed."""
    if not folder.exists():  # killed before the run had its name: it can be started again
        return False
    for name in WHOLE[: 3 if not (folder / "status.json").exists() else 4]:
        json.loads((folder / name).read_bytes())
    if not list(folder.glob("checkpoints/step-*")):
        with pytest.raises(PlanError, match="has no checkpoint"):
            load_latest(folder)
        return False
    check_end(folder, wanted)
    return True


def tried(points, out, wanted, action, settle=lambda folder: None):
    """Return for each point of a kill if the run could be resumed."""
    found = []
    for point in points:
        folder = out / str(point) / "cut"
        folder.parent.mkdir()
        settle(folder.parent)
        code = killed_at(point, folder.parent, lambda folder=folder: action(folder))
        assert code in (0, -signal.SIGKILL)
        found.append(check_killed(folder, wanted))
    return found


def go_on(folder):
    resume.resume(folder, {"iterations": ITERATIONS}, make_reporter(quiet=True))


def laid_out(unfinished, out):
    """Copy the run as ``cut``."""
    shutil.copytree(unfinished, out / "cut", symlinks=True)


def ordered(found):
    """Check that once a checkpoint exists, later kills also leave one. The run also writes its status at
    fixed times, so on a slow machine the checkpoint may come a few changes later than in another run."""
    first = found.index(True)
    return all(found[first + 4 :])


def drawn(places):
    return sorted(random.Random(0).sample(range(places), DRAWN))


@pytest.mark.slow
def test_a_run_killed_at_random_folder_changes_ends_the_same(straight, tmp_path):
    wanted, calls = straight
    assert any(tried(drawn(2 * calls), tmp_path, wanted, lambda folder: null_run(folder.parent)))


@pytest.mark.slow
def test_a_resume_killed_at_random_folder_changes_ends_the_same(straight, unfinished, tmp_path):
    assert all(tried(drawn(200), tmp_path, straight[0], go_on, partial(laid_out, unfinished)))


@pytest.mark.long
def test_a_run_killed_at_any_folder_change_ends_the_same(straight, tmp_path):
    wanted, calls = straight
    found = tried(range(0, 2 * calls + 2, 7), tmp_path, wanted, lambda folder: null_run(folder.parent))
    assert ordered(found)
    assert sum(found) > 20


@pytest.mark.long
def test_a_resume_killed_at_any_folder_change_ends_the_same(straight, unfinished, tmp_path):
    assert all(tried(range(0, 200, 11), tmp_path, straight[0], go_on, partial(laid_out, unfinished)))


def stopped_before_the_end(out):
    """Stop a run after it has written its last checkpoint and before it writes anything else."""

    def dying():
        from rlflow.runs import final

        final.write_models = lambda prepared, folder: os.kill(os.getpid(), signal.SIGKILL)
        null_run(out)

    assert in_child(dying) == -signal.SIGKILL
    return out / "cut"


def test_resume_finishes_a_run_killed_before_its_final_models(straight, tmp_path):
    folder = stopped_before_the_end(tmp_path)
    assert not (folder / "final").exists()
    before = sorted(path.name for path in (folder / "checkpoints").iterdir())
    check_end(folder, straight[0])
    # the run saves nothing twice
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == before
    with pytest.raises(PlanError, match="has finished all its iterations"):
        resume.resume(folder, {}, make_reporter(quiet=True))


def test_missing_or_outdated_final_models_are_written_again(tmp_path):
    folder = null_run(tmp_path).folder
    (folder / "final/actor/null.txt").unlink()
    (folder / "final/actor").rmdir()
    resume.resume(folder, {}, make_reporter(quiet=True))
    assert (folder / "final/actor/null.txt").read_text().startswith("3 ")

    def dying():
        from rlflow.runs import final

        final.write_models = lambda prepared, folder: os.kill(os.getpid(), signal.SIGKILL)
        resume.resume(folder, {"iterations": 4}, make_reporter(quiet=True))

    assert in_child(dying) == -signal.SIGKILL
    assert (folder / "final/actor/null.txt").read_text().startswith("3 ")
    assert resumed(folder) == 0
    assert (folder / "final/actor/null.txt").read_text().startswith("4 ")


def test_a_run_killed_before_it_has_its_name_leaves_no_run(tmp_path):
    """The process is killed while it makes the run's folder: the name stays free, and no command reads the
    remains as a run."""
    assert killed_at(10, tmp_path, lambda: null_run(tmp_path)) == -signal.SIGKILL
    from rlflow.monitoring.history import run_folders

    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == []
    assert run_folders(tmp_path) == []
    assert null_run(tmp_path).folder.name == "cut"


def check_whole(out):
    """Check the files after a power loss: no run, or a run with its settings, with logs up to its checkpoint,
    and with final models if its status is done. Return the checkpoint's iteration."""
    if not (out / "cut").exists():
        return -1
    for name in ("settings.json", "identity.json", "graph.json"):
        json.loads((out / "cut" / name).read_bytes())
    wire.unpack((out / "cut/graph.msgpack").read_bytes())
    if (out / "cut/final").exists():
        assert (out / "cut/final/actor/null.txt").read_text().startswith(f"{ITERATIONS} ")
    if (out / "cut/status.json").exists() and (out / "cut/status.json").stat().st_size:
        assert status.read(out / "cut").state != "done" or (out / "cut/final").exists()
    if not (out / "cut/checkpoints/latest").exists():
        return 0
    loaded = load_latest(out / "cut")
    assert loaded.rejected == []
    lines = (out / "cut/metrics.jsonl").read_bytes().splitlines()[: loaded.snapshot.iteration]
    assert [json.loads(line)["iteration"] for line in lines] == list(range(loaded.snapshot.iteration))
    return loaded.snapshot.iteration


@pytest.mark.slow
def test_a_power_loss_at_any_folder_change_leaves_a_complete_run(tmp_path):
    out, turn, chance, states = tmp_path / "out", threading.Lock(), random.Random(0), []
    out.mkdir()
    disk = powerloss.Disk.of(out)

    def after(name, args, kwargs, result):
        with turn:  # a checkpoint is first written next to the run
            disk.after(name, args, kwargs, result)
            states.extend(disk.states(chance, mixed=1))

    with faults.watching(after=after):
        null_run(out)
    found = set()
    for number, state in enumerate({tuple(state.items()): state for state in states}.values()):
        where = tmp_path / str(number)
        where.mkdir()
        found.add(check_whole(powerloss.write(state, where)))
        shutil.rmtree(where)
    assert found == {-1, 0, 1, 2, 3}
