"""The part of a command that other users see."""

import subprocess
import sys
from pathlib import Path

import pytest

from rlflow.monitoring.command_line import flags, masked_word

SECRET = "canary-77c1"


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["run", "ppo", "--hp.api_key", SECRET], ["run", "ppo", "--hp.api_key", "***"]),
        (["run", f"--hp.db_pass={SECRET}", "--lr", "1e-6"], ["run", "--hp.db_pass=***", "--lr", "1e-6"]),
        (["--hp.token=", "--actor.auth", "--lr", "3"], ["--hp.token=", "--actor.auth", "--lr", "3"]),
        (["--ray-address", "redis://:pw-of-ray@host:1"], ["--ray-address", "redis://:***@host:1"]),
        (["--data", "hf_" + "aB3" * 11], ["--data", "***"]),
        (["--hp.key_dim", "64", "--max_tokens=16"], ["--hp.key_dim", "64", "--max_tokens=16"]),
        ([], []),
    ],
)
def test_secret_values_are_not_shown(words, shown):
    assert [masked_word(words, number) for number in range(len(words))] == shown


def test_flags_are_read_from_an_invalid_command_line():
    assert dict(flags(["x", "--a", "--b=c=d", "--e", "f", "--g"])) == {"a": "", "b": "c=d", "e": "f", "g": ""}


SHOWS = """
import sys
from pathlib import Path
from rlflow.monitoring.command_line import take_arguments
words = take_arguments()
print(Path("/proc/self/cmdline").read_bytes().decode().split("\\0")[1:-1])
print(words == {words!r}, sys.argv[1:], sys.orig_argv[-len(words):] == sys.argv[1:], flush=True)
sys.stdin.read()
"""


def test_only_the_process_table_masks_secrets(tmp_path):
    words = ["run", "--hp.api_key", SECRET, "--name", "ünder", "", f"--pass={SECRET}ä", "--lr", "1"]
    (tmp_path / "shows.py").write_text(SHOWS.replace("{words!r}", repr(words)))
    command = [sys.executable, tmp_path / "shows.py", *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        there, known = (process.stdout.readline() for _ in range(2))
        outside = Path(f"/proc/{process.pid}/cmdline").read_bytes().decode()
        process.stdin.close()
    stars = "*" * len(SECRET)
    shown = [
        str(tmp_path / "shows.py"),
        "run",
        "--hp.api_key",
        stars,
        "--name",
        "ünder",
        "",
        f"--pass={stars}**",
        "--lr",
        "1",
    ]
    assert there == f"{shown}\n"
    assert (
        known
        == f"True {['run', '--hp.api_key', '***', '--name', 'ünder', '', '--pass=***', '--lr', '1']} True\n"
    )
    assert SECRET not in outside


def test_foreign_words_do_not_change_the_command_line(monkeypatch):
    from rlflow.monitoring.command_line import take_arguments

    before = Path("/proc/self/cmdline").read_bytes()
    monkeypatch.setattr(sys, "argv", ["rlflow", "run", f"--token={SECRET}"])
    assert take_arguments() == ["run", f"--token={SECRET}"]
    assert sys.argv == ["rlflow", "run", "--token=***"]
    assert Path("/proc/self/cmdline").read_bytes() == before
