import pytest

from rlflow.errors import PlanError
from rlflow.runs import directory

OUTSIDE = ("../up", "/abs", "a/b", "..", ".", "", "a\0b", "a\nb", "~", "-x", "a b", "%2e%2e/x")


def test_runs_are_numbered_and_never_share_a_folder(tmp_path):
    assert [directory.create(tmp_path, None, "ppo").name for _ in range(3)] == ["ppo-1", "ppo-2", "ppo-3"]


def test_a_name_taken_by_another_process_is_left_alone(tmp_path, monkeypatch):
    (tmp_path / "ppo-1").mkdir()
    (tmp_path / "ppo-1" / "theirs").write_text("")
    monkeypatch.setattr(directory.os.path, "lexists", lambda path: False)  # the folder did not exist yet
    folder = directory.create(tmp_path, None, "ppo")
    assert folder.name == "ppo-2"
    assert [path.name for path in (tmp_path / "ppo-1").iterdir()] == ["theirs"]


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


def test_an_unwritable_folder_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match="cannot write a run|exists"):
        directory.create(tmp_path / "file" / "runs", None, "ppo")


def test_a_folder_is_shown_relative_to_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert directory.shown(tmp_path / "here" / "runs" / "one") == "runs/one"
    assert directory.shown(tmp_path / "runs" / "one") == str(tmp_path / "runs" / "one")
