"""A run that is killed at any call that changes its folder is resumed to the end of the run that was not, or
never was there."""

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
DRAWN = 5  # places at which a run is killed outside of the tests that try each
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
    """The exit status of a child that does this and is killed before its n-th change of what lies below
    ``root``; in the middle of it where that is a write and n is odd."""

    def dying():
        with faults.watching(*faults.below(root, faults.dying_at(point))):
            action()

    return in_child(dying)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The run that nothing happens to, and how many changes of its folder it makes."""
    out, calls = tmp_path_factory.mktemp("straight"), []
    with faults.watching(*faults.below(out, lambda name, args: calls.append(name))):
        folder = null_run(out, "straight").folder
    return content(folder), len(calls)


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A run that has iterations left, for copies to go on from."""
    return null_run(tmp_path_factory.mktemp("begun"), iterations=2).folder


def check_end(folder, wanted):
    """It is resumed to the same end, if it had not come to it, and nothing half written is left."""
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
    """What a killed run left is whole. Whether it could be resumed."""
    if not folder.exists():  # killed before it had its name: it can be started again
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
    """Whether the run could be resumed, for each point at which it was killed."""
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


def laid_out(begun, out):
    """A copy of the run as ``cut``."""
    shutil.copytree(begun, out / "cut", symlinks=True)


def ordered(found):
    """Once there is a checkpoint there always is one. The run's status is written with the time too, so on a
    slow machine the checkpoint comes a few changes later than in another run."""
    first = found.index(True)
    return all(found[first + 4 :])


def drawn(places):
    return sorted(random.Random(0).sample(range(places), DRAWN))


@pytest.mark.slow
def test_killed_at_drawn_changes_of_its_folder_a_run_ends_the_same(straight, tmp_path):
    wanted, calls = straight
    assert any(tried(drawn(2 * calls), tmp_path, wanted, lambda folder: null_run(folder.parent)))


@pytest.mark.slow
def test_killed_at_drawn_changes_of_its_folder_a_resumed_run_ends_the_same(straight, begun, tmp_path):
    assert all(tried(drawn(200), tmp_path, straight[0], go_on, partial(laid_out, begun)))


@pytest.mark.long
def test_killed_at_any_change_of_its_folder_a_run_ends_the_same(straight, tmp_path):
    wanted, calls = straight
    found = tried(range(0, 2 * calls + 2, 7), tmp_path, wanted, lambda folder: null_run(folder.parent))
    assert ordered(found)
    assert sum(found) > 20


@pytest.mark.long
def test_killed_at_any_change_of_its_folder_a_resumed_run_ends_the_same(straight, begun, tmp_path):
    assert all(tried(range(0, 200, 11), tmp_path, straight[0], go_on, partial(laid_out, begun)))


def stopped_before_the_end(out):
    """A run whose last checkpoint is written and nothing after it."""

    def dying():
        from rlflow.runs import final

        final.write_models = lambda prepared, folder: os.kill(os.getpid(), signal.SIGKILL)
        null_run(out)

    assert in_child(dying) == -signal.SIGKILL
    return out / "cut"


def test_a_run_killed_before_its_final_models_is_finished_by_resume(straight, tmp_path):
    folder = stopped_before_the_end(tmp_path)
    assert not (folder / "final").exists()
    before = sorted(path.name for path in (folder / "checkpoints").iterdir())
    check_end(folder, straight[0])
    # nothing is saved twice
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == before
    with pytest.raises(PlanError, match="has finished all its iterations"):
        resume.resume(folder, {}, make_reporter(quiet=True))


def test_final_models_that_are_gone_or_of_an_earlier_end_are_written_again(tmp_path):
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


def test_a_run_that_has_not_its_name_yet_leaves_no_run_behind(tmp_path):
    """Killed as its folder is being made: the name is free, and nobody takes what is there for a run."""
    assert killed_at(10, tmp_path, lambda: null_run(tmp_path)) == -signal.SIGKILL
    from rlflow.monitoring.history import run_folders

    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == []
    assert run_folders(tmp_path) == []
    assert null_run(tmp_path).folder.name == "cut"


def check_whole(out):
    """What is there after the power went: no run, or one that says what it is, whose logs reach as far as its
    checkpoint, and which has its final models if it says that it is done. Gives the checkpoint's
    iteration."""
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
def test_lost_power_before_any_change_of_its_folder_leaves_a_run_that_is_whole(tmp_path):
    out, turn, chance, states = tmp_path / "out", threading.Lock(), random.Random(0), []
    out.mkdir()
    disk = powerloss.Disk.of(out)

    def after(name, args, kwargs, result):
        with turn:  # a checkpoint is written beside the run
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
