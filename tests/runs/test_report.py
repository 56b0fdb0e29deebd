"""The summary at the end of a run."""

from types import SimpleNamespace

from rlflow.runs.directory import shown
from rlflow.runs.report import _answers


def test_five_answers_are_shown():
    rows = [{"prompt": f"q{n}", "answer": "a", "before": "b", "after": "c"} for n in range(7)]
    assert _answers(SimpleNamespace(answers=rows)).row_count == 5


def test_a_folder_is_shown_relative_to_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert shown(tmp_path / "here" / "runs" / "one") == "runs/one"
    assert shown(tmp_path / "runs" / "one") == str(tmp_path / "runs" / "one")
