"""`rlflow data` from a user's view."""

import json

import pytest
from sources import TASKS

from rlflow.cli.main import exit_code

MODEL = TASKS / "arithmetic_model"


@pytest.fixture
def called(monkeypatch, capsys, tmp_path):
    """Run the command in this process; return its exit code and output."""
    lines = [
        {"question": "7 + 5 =", "answer": "12", "level": 1},
        {"question": "", "answer": "0"},
        {"question": "9 " * 200, "answer": "0"},
    ]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + "no json\n")

    def call(*words):
        monkeypatch.chdir(tmp_path)
        return exit_code(["data", *words]), *capsys.readouterr()

    return call


def test_fields_lengths_dropped_records_and_rows_are_printed(called):
    code, out, err = called("d.jsonl", "--model", str(MODEL))
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "d.jsonl: 1 usable records, prompts"
    assert "  prompt       read from the field 'question'" in lines
    assert "  unused fields: level (--data.NAME FIELD maps a field)" in lines
    assert any(
        line.startswith("  skipped: 1 too long; the model accepts at most 256 tokens of a prompt")
        and "d.jsonl:3" in line
        for line in lines
    )
    assert any(line.startswith("  skipped: 1 without a prompt (d.jsonl:2)") for line in lines)
    assert any(line.startswith("  skipped: 1 unreadable (d.jsonl:4)") for line in lines)
    assert "  prompts: 4 to 4 tokens, median 4, 95th percentile 4" in lines
    assert "  prompts are formatted as plain text, without a chat template" in lines
    assert "row 1, d.jsonl:1" in lines
    assert "    7 + 5 =" in lines


def test_json_has_the_same_content(called):
    code, out, _ = called("d.jsonl", "--json", "--rows", "0")
    assert code == 0
    assert (json.loads(out)["records"], json.loads(out)["rows"]) == (2, [])


def test_several_sources_are_shown_with_their_shares(called, tmp_path):
    (tmp_path / "e.jsonl").write_text('{"ask": "how?", "answer": "so"}\n')
    sources = ["d.jsonl:3", "--data", "other=e.jsonl:1", "--data.other.prompt", "ask", "--rows", "0"]
    code, out, err = called(*sources)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    heads = ["source d: 75.0% of the prompts", "source other: 25.0% of the prompts"]
    assert [line for line in lines if line.startswith("source ")] == heads
    assert "  prompt       read from the field 'ask'" in lines
    code, out, _ = called(*sources, "--json")
    assert {name: (found["share"], found["records"]) for name, found in json.loads(out).items()} == {
        "d": (0.75, 2),
        "other": (0.25, 1),
    }


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["d.jsonl", "--row", "1"], "nearest:  --rows"),
        (["d.jsonl", "--rows", "few"], "a number of records"),
        (["e.jsonl"], "e.jsonl"),
        (["d.jsonl", "--data.promt", "question"], "nearest:  prompt"),
        (["d.jsonl", "--model", "nowhere"], "no such model folder: nowhere"),
    ],
)
def test_errors_are_reported(called, words, says):
    code, _, err = called(*words)
    assert code == 2
    assert says in err
