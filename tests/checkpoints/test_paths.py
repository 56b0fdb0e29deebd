"""No name in a manifest, a pointer or a snapshot leads out of the run's folder."""

import json
import os

import pytest
import torch

from rlflow.checkpoints.export import export
from rlflow.checkpoints.reading import load_latest, verify
from rlflow.checkpoints.snapshot import Snapshot
from rlflow.checkpoints.writer import Writer
from rlflow.errors import PlanError

VECTORS = [
    "../outside",
    "/etc/hostname",
    "actor/../../outside",
    "actor/../config.json",
    "..",
    ".",
    "",
    "actor/x/y",
    "a\0b",
    "%2e%2e/outside",
    "..\\outside",
    "C:\\outside",
    "~/outside",
    ".hidden",
    "-rf",
    "．．/outside",
    "a\n",
    "actor//x",
    "./x",
    "manifest.json",
    "manifest.json/x",
    "a" * 300,
]


@pytest.mark.parametrize("name", VECTORS, ids=ascii)
def test_a_manifest_cannot_name_a_file_outside(tmp_path, campaign, name):
    run = campaign.write_run(tmp_path / "run", (11,))
    (tmp_path / "run/checkpoints/outside").write_bytes(b"{}")
    place = run / "checkpoints/step-00000011"
    manifest = json.loads((place / "manifest.json").read_bytes())["manifest"]
    manifest["files"][name] = manifest["files"]["actor/config.json"]
    (place / "manifest.json").write_bytes(campaign.signed(json.dumps(manifest).encode()))
    (run / "checkpoints/latest").unlink()
    assert "is refused" in verify(place)[0]
    with pytest.raises(PlanError, match="is refused"):
        load_latest(run)


@pytest.mark.parametrize("name", VECTORS, ids=ascii)
def test_a_snapshot_with_such_a_name_cannot_be_made(name):
    with pytest.raises(PlanError, match="name"):
        Snapshot(0, files={name: b""})
    with pytest.raises(PlanError, match="name"):
        Snapshot(0, {name.removesuffix("manifest.json") or "..": {"w": torch.ones(1)}})


def test_a_linked_folder_of_checkpoints_is_refused(tmp_path, campaign):
    campaign.write_run(tmp_path / "elsewhere")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/checkpoints").symlink_to(tmp_path / "elsewhere/checkpoints")
    for use in (load_latest, Writer):
        with pytest.raises(PlanError, match="symbolic link"):
            use(tmp_path / "run")


def test_a_link_instead_of_a_file_is_not_followed(tmp_path, campaign):
    run = campaign.write_run(tmp_path / "run")
    for name in ("surplus.safetensors", "actor/config.json", "manifest.json"):
        file = run / "checkpoints/step-00000012" / name
        os.rename(file, tmp_path / "outside")
        file.symlink_to(tmp_path / "outside")
        loaded = load_latest(run)
        assert loaded.snapshot.iteration == 11
        assert len(loaded.rejected) == 1
        os.replace(tmp_path / "outside", file)
        assert load_latest(run).rejected == []


def test_a_pipe_instead_of_a_file_does_not_hang(tmp_path, campaign):
    run = campaign.write_run(tmp_path / "run")
    for name in ("surplus.safetensors", "manifest.json"):
        file = run / "checkpoints/step-00000012" / name
        file.unlink()
        os.mkfifo(file)
    assert load_latest(run).snapshot.iteration == 11


def test_removing_old_checkpoints_follows_no_link(tmp_path, campaign):
    run = campaign.write_run(tmp_path / "run", (1,))
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/file").write_text("mine")
    (run / "checkpoints/step-00000000").symlink_to(tmp_path / "precious", target_is_directory=True)
    with Writer(run, keep=1) as writer:
        writer.submit(campaign.example(2))
    assert (tmp_path / "precious/file").read_text() == "mine"
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["latest", "step-00000002"]


def test_an_export_uses_no_role_name_as_a_path(tmp_path, campaign):
    run = campaign.write_run(tmp_path / "run")
    with pytest.raises(PlanError, match="no role"):
        export(run, tmp_path / "out", "../actor")
