"""No corruption of a checkpoint is loaded, and each is reported."""

import collections

import pytest

from rlflow.checkpoints.reading import load_latest, verify
from rlflow.checkpoints.writer import Writer
from rlflow.errors import PlanError


@pytest.mark.slow
def test_no_corruption_is_loaded_and_the_previous_checkpoint_is_used(tmp_path, campaign):
    run = campaign.write_run(tmp_path / "run")
    every = list(campaign.corruptions(run))
    found = {(c.kind, c.name): campaign.outcome(run, c, tmp_path / "scratch") for c in every}
    assert {what: outcome for what, outcome in found.items() if outcome.startswith("wrong")} == {}
    assert len(every) == len(found) >= 300
    assert collections.Counter(found.values())["previous"] >= 300


def test_verify_names_each_damaged_file(tmp_path, campaign):
    run = campaign.write_run(tmp_path / "run")
    path = run / "checkpoints" / "step-00000012"
    (path / "surplus.safetensors").write_bytes(b"\0" * 10)
    (path / "actor/config.json").unlink()
    found = " | ".join(verify(path))
    assert "surplus.safetensors: found 10 bytes" in found
    assert "actor/config.json is missing" in found


def test_foreign_files_in_a_checkpoint_are_ignored_and_named(tmp_path, campaign):
    run = campaign.write_run(tmp_path / "run")
    for step in (11, 12):
        (run / f"checkpoints/step-{step:08d}/.DS_Store").write_bytes(b"\0")
        (run / f"checkpoints/step-{step:08d}/actor/notes").mkdir()
    loaded = load_latest(run)
    assert (loaded.snapshot.iteration, loaded.rejected) == (12, [])
    assert loaded.ignored == [".DS_Store", "actor/notes/"]
    assert campaign.same(loaded.snapshot, campaign.example(12))
    assert verify(loaded.path) == []


def test_without_a_good_checkpoint_every_reason_is_reported(tmp_path, campaign):
    run = campaign.write_run(tmp_path / "run")
    for step in (11, 12):
        (run / f"checkpoints/step-{step:08d}/manifest.json").write_bytes(b"{}")
    with pytest.raises(
        PlanError, match=r"no checkpoint of the run(.|\n)*12': manifest.json(.|\n)*11': manifest.json"
    ):
        load_latest(run)


def test_after_damage_the_writer_keeps_the_good_checkpoint(tmp_path, campaign):
    run = campaign.write_run(tmp_path / "run")
    damaged = run / "checkpoints/step-00000012"
    (damaged / "surplus.safetensors").unlink()
    with Writer(run, keep=2) as writer:
        writer.submit(campaign.example(12))
    assert writer.failures == []
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        "latest",
        "step-00000011",
        "step-00000012",
        "step-00000012-2",
    ]
    loaded = load_latest(run)
    assert (loaded.path.name, loaded.rejected) == ("step-00000012-2", [])
    with Writer(run, keep=2) as writer:
        writer.submit(campaign.example(13))
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        "latest",
        "step-00000012-2",
        "step-00000013",
    ]
