"""A writer that dies at any call, or a power loss at that call, leaves the last good checkpoint."""

import random

import pytest

from rlflow.checkpoints import durable
from rlflow.checkpoints.folder import steps
from rlflow.checkpoints.reading import load_latest, verify
from rlflow.checkpoints.writer import Writer

pytestmark = pytest.mark.slow  # real processes, disks or libraries: seconds each


@pytest.fixture(scope="module")
def killed(tmp_path_factory, campaign, injected):
    """Runs whose writer was killed, each at another call, in the order of the calls."""
    folder = tmp_path_factory.mktemp("killed")
    campaign.write_run(folder / "base", (10, 11), keep=2)
    injected("kill", folder)
    return sorted(path for path in folder.iterdir() if path.name != "base")


@pytest.mark.slow
def test_a_kill_at_any_call_leaves_a_good_checkpoint(killed, campaign):
    found = []
    for run in killed:
        loaded = load_latest(run)
        assert loaded.rejected == []
        assert campaign.same(loaded.snapshot, campaign.example(loaded.snapshot.iteration))
        # and no partly removed one
        assert [verify(path) for path in steps(run / "checkpoints")] == [[]] * len(steps(run / "checkpoints"))
        found.append(loaded.snapshot.iteration)
    assert len(killed) >= 100
    assert found == sorted(found)  # once the new one exists it stays
    assert set(found) == {11, 12}


@pytest.mark.slow
def test_the_next_writer_removes_the_remains_of_a_killed_one(killed, campaign):
    hidden = 0
    for run in killed:
        hidden += sum(path.name.startswith(".") for path in (run / "checkpoints").iterdir())
        with Writer(run, keep=1) as writer:
            writer.submit(campaign.example(13))
        assert writer.failures == []
        assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["latest", "step-00000013"]
    assert hidden > 50


def test_the_folder_of_a_living_writer_is_left_alone(tmp_path, campaign):
    campaign.write_run(tmp_path / "run")
    own = durable.aside(tmp_path / "run/checkpoints/step-00000013")
    own.mkdir()
    Writer(tmp_path / "run").close()
    assert own.is_dir()


def test_a_power_loss_at_any_call_leaves_a_good_checkpoint(tmp_path, campaign, faults, powerloss):
    run = campaign.write_run(tmp_path / "run", (10, 11), keep=2)
    disk, chance, states, named = powerloss.Disk.of(run), random.Random(0), [], []

    def after(name, args, kwargs, result):
        disk.after(name, args, kwargs, result)
        named.append((name == "rename" and str(args[1]).endswith("latest")) or (bool(named) and named[-1]))
        done = len(named) > 4 and named[-4]  # the pointer was renamed, its folder opened and flushed
        states.extend((done, state) for state in disk.states(chance))

    with faults.watching(after=after):
        writer = Writer(run, keep=1, shard_bytes=500)
        writer.submit(campaign.example(12))
        writer.close()
    found = []
    for number, (done, state) in enumerate(states):
        loaded = load_latest(powerloss.write(state, tmp_path / str(number)))
        assert loaded.rejected == []
        assert campaign.same(loaded.snapshot, campaign.example(loaded.snapshot.iteration))
        assert loaded.snapshot.iteration == 12 or not done
        found.append(loaded.snapshot.iteration)
    assert len(states) > 300
    assert set(found) == {11, 12}
