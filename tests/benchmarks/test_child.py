"""The process of a cell: it answers each line with a line, whatever the system does."""

import io
import json
from pathlib import Path

from rlflow.benchmarks.child import serve

COUNTING = Path(__file__).parent / "counting.py"


def replies(path, *requests):
    answers = io.StringIO()
    serve(str(path), io.StringIO("".join(json.dumps(request) + "\n" for request in requests)), answers)
    return [json.loads(line) for line in answers.getvalue().splitlines()]


def test_requests_are_answered_and_their_end_closes_the_system(tmp_path):
    prepare = {
        "do": "prepare",
        "cell": {"flags": {"iterations": 3, "seconds": 0.5}},
        "folder": str(tmp_path),
        "seed": 0,
    }
    answers = replies(COUNTING, prepare, {"do": "iterate", "count": 2}, {"do": "observe"})
    assert answers[0] == {"value": {"iterations": 3}}
    assert [row["iteration"] for row in answers[1]["value"]["iterations"]] == [0, 1]
    assert answers[2] == {"value": {"fates": "trained", "closes": True}}
    assert (tmp_path / "closed").exists()


def test_an_exception_is_the_answer_and_the_system_continues(tmp_path):
    prepare = {"do": "prepare", "cell": {"flags": {"fails": "prepare"}}, "folder": str(tmp_path), "seed": 0}
    answers = replies(COUNTING, prepare, {"do": "observe"}, {"do": "remove"})
    assert answers[0] == {"error": "ValueError: no such model"}
    assert answers[1]["value"]["closes"]
    assert answers[2] == {"error": "ValueError: there is no request 'remove'"}


def test_a_file_without_a_system_gives_an_error_answer(tmp_path):
    (tmp_path / "empty.py").touch()
    (tmp_path / "broken.py").write_text("def")
    assert "has no attribute 'System'" in replies(tmp_path / "empty.py", {"do": "observe"})[0]["error"]
    assert "SyntaxError" in replies(tmp_path / "broken.py", {"do": "observe"})[0]["error"]
