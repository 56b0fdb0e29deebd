import json

from rlflow.monitoring import served
from rlflow.monitoring.served import ServedProcess

JUDGE = ServedProcess("judge", "serve --port 1", "http://127.0.0.1:1", "serving", 2, 77, "services/judge.log")


def test_a_written_file_is_read_and_shown(tmp_path):
    far = ServedProcess("far", "http://far", "http://far", "elsewhere")
    served.write(tmp_path, [JUDGE, far])
    assert served.read(tmp_path) == [JUDGE, far]
    assert list(served.lines(tmp_path)) == [
        "judge at http://127.0.0.1:1: serving, started 2 times: serve --port 1 (log: services/judge.log)",
        "far at http://far, not started by this run",
    ]


def test_secrets_of_a_command_are_masked(tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "sk-this-is-a-secret-0123456789")
    served.write(
        tmp_path,
        [ServedProcess("judge", "serve --key sk-this-is-a-secret-0123456789", "http://h", "serving")],
    )
    assert "sk-this-is-a-secret" not in (tmp_path / served.FILE).read_text()


def test_a_file_with_other_content_shows_nothing(tmp_path):
    for text in ("", "{", "3", json.dumps([3, {"name": 1}, {}])):
        (tmp_path / served.FILE).write_text(text)
        assert list(served.lines(tmp_path)) == []
