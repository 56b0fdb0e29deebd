"""The run's folder keeps the output of rewards: full lines, without secrets, up to a limit."""

import json
import threading

import pytest

import rlflow
from rlflow import StageError
from rlflow.monitoring.secrets import remember
from rlflow.runs import directory
from rlflow.runs.directory import FILE, Printed


def failed(error):
    raise error


def lines(folder):
    return (folder / FILE).read_text().splitlines()


def test_partial_output_becomes_lines(tmp_path):
    heard = Printed(tmp_path, failed)
    for piece in (b"one\ntw", b"o", b"\n\x1b[2Jthree", b""):
        heard.on_output(piece)
    heard.on_output(b"four")
    heard.close()
    assert lines(tmp_path) == ["one", "two", "\\x1b[2Jthree", "four"]


def test_lines_of_two_processes_do_not_mix(tmp_path):
    heard = Printed(tmp_path, failed)
    heard.on_output(b"mine ")
    other = threading.Thread(target=heard.on_output, args=(b"another's\n",))
    other.start()
    other.join()
    heard.on_output(b"and mine\n")
    heard.close()
    assert lines(tmp_path) == ["another's", "mine and mine"]


def test_silent_rewards_leave_no_file_and_secrets_are_masked(tmp_path):
    silent = Printed(tmp_path, failed)
    silent.on_output(b"")
    silent.close()
    assert not (tmp_path / FILE).exists()
    remember({"api_key": "hunter2-hunter2"})
    heard = Printed(tmp_path, failed)
    heard.on_output(b"the key is hunter2-hunter2\n")
    heard.close()
    assert "hunter2" not in (tmp_path / FILE).read_text()


def test_the_output_file_keeps_its_limit_after_a_resume(tmp_path, monkeypatch):
    monkeypatch.setattr(directory, "LIMIT", 100)
    for _ in range(2):
        heard = Printed(tmp_path, failed)
        for _ in range(50):
            heard.on_output(b"0123456789\n")
        heard.on_output(b"x" * 10_000)  # a line without an end
        heard.close()
    assert (tmp_path / FILE).stat().st_size < 300
    assert lines(tmp_path)[9].startswith("the file is limited to")


@pytest.mark.slow
def test_the_run_folder_keeps_the_output_of_a_reward(tmp_path):
    (tmp_path / "loud.py").write_text(
        "def loud(completion):\n    print('judging', completion)\n    return 1.0\n"
    )
    done = rlflow.run(
        "grpo",
        backend="null",
        reward=f"{tmp_path / 'loud.py'}:loud",
        prompts=2,
        iterations=1,
        out=str(tmp_path / "runs"),
        threads=1,
        **{"hp.samples": 2},
    )
    assert sorted(lines(done.folder)) == [f"judging {row}" for row in completions(done.folder)]


def completions(folder):
    rows = map(json.loads, (folder / "samples.jsonl").read_text().splitlines())
    return sorted(row["completion"] for row in rows)


def test_a_raising_reward_is_reported_with_its_source_lines(tmp_path):
    (tmp_path / "helping.py").write_text("def deep(text):\n    return {}[text]\n")
    (tmp_path / "judge.py").write_text(
        "from helping import deep\n\n\ndef judge(completion):\n    return deep('score')\n"
    )
    (tmp_path / "data.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n} =", "answer": str(n)}) + "\n" for n in range(8))
    )
    with pytest.raises(StageError) as caught:
        rlflow.run(
            "grpo",
            backend="null",
            data=str(tmp_path / "data.jsonl"),
            reward=f"{tmp_path}/judge.py:judge",
            prompts=2,
            iterations=1,
            held_out=0,
            threads=1,
            out=str(tmp_path / "runs"),
        )
    assert (
        f"judge/raised: {tmp_path}/helping.py:2: KeyError: 'score'; called by {tmp_path}/judge.py:5, in "
        "judge: return deep('score'). The full traceback is in rewards.txt in the run's folder"
    ) in str(caught.value)
    kept = lines(tmp_path / "runs" / "grpo-1")
    assert kept.count("Traceback (most recent call last):") == 1
    assert [line for line in kept if str(tmp_path) in line] == [
        f'  File "{tmp_path}/judge.py", line 5, in judge',
        f'  File "{tmp_path}/helping.py", line 2, in deep',
    ]
    assert kept[-1] == "KeyError: 'score'"
