"""`rlflow runs`, `show`, `watch` and `doctor` on real runs, damaged runs and foreign folders."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rlflow.monitoring import status
from rlflow.monitoring.doctor import reach, token_line
from rlflow.monitoring.follow import follow
from rlflow.monitoring.plain_display import Plain
from rlflow.monitoring.tables import settings, sparkline
from rlflow.processes.interfaces import Interface
from rlflow.processes.process import Process

pytestmark = pytest.mark.slow  # whole runs, models or processes: each test is short, all together are not


@pytest.fixture
def runs(finished, tmp_path):
    """runs/ with one finished run."""
    return shutil.copytree(finished, tmp_path / "runs")


def evaluate(folder, iteration, share):
    """Add an evaluation to a run's metrics."""
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(
            json.dumps({"iteration": iteration, "evaluation/sampled": share, "evaluation/greedy": 1.0}) + "\n"
        )


def line_of(out, name):
    return next(line for line in out.splitlines() if line.startswith(name)).split()


def test_runs_lists_each_with_its_state_and_last_numbers(called, runs):
    for state, name in (("running", "live"), ("failed", "broken"), ("interrupted", "stopped")):
        shutil.copytree(runs / "ppo-1", runs / name)
        status.write(runs / name, replace(status.begun("ppo", 9), state=state, iteration=2))
    gone = replace(status.begun("ppo", 9), process=replace(Process.this(), pid=2**22 + 1))
    status.write(shutil.copytree(runs / "ppo-1", runs / "killed"), gone)
    (runs / "killed" / "metrics.jsonl").write_text("")
    evaluate(runs / "live", 2, 0.375)
    (runs / "not-a-run").mkdir()
    (runs / "file").write_text("")
    code, out, _ = called("runs")
    assert code == 0
    assert line_of(out, "run")[:7] == ["run", "flow", "state", "iteration", "accuracy", "reward", "age"]
    assert line_of(out, "ppo-1")[1:4] == ["ppo", "done", "3/3"]
    assert line_of(out, "live")[1:5] == ["ppo", "running", "3/9", "37.5%"]
    assert [line_of(out, name)[2] for name in ("broken", "stopped", "killed")] == [
        "failed",
        "interrupted",
        "died",
    ]
    assert float(line_of(out, "ppo-1")[4]) > 0  # the reward
    assert "not-a-run" not in out


DAMAGE = {
    "no status": lambda run: (run / "status.json").unlink(missing_ok=True),
    "half a status": lambda run: (run / "status.json").write_text('{"state": "runn'),
    "another's status": lambda run: (run / "status.json").write_text('{"state": "ok", "pid": "x"}'),
    "wrong kinds": lambda run: (run / "status.json").write_text('{"state": "done", "iteration": "many"}'),
    "binary": lambda run: [path.write_bytes(bytes(range(256)) * 9) for path in run.glob("*.json*")],
    "empty": lambda run: [path.write_bytes(b"") for path in run.glob("*.json*")],
    "lists": lambda run: [path.write_text("[1]\n") for path in run.glob("*.json*")],
    "odd values": lambda run: (run / "metrics.jsonl").write_text(
        '{"iteration": 0, "reward/mean": "x"}\n{"iteration": "y"}\nnull\n{"iter'
    ),
    "a folder for a file": lambda run: [(run / "metrics.jsonl").unlink(), (run / "metrics.jsonl").mkdir()],
    "odd settings": lambda run: (run / "settings.json").write_text(
        '{"options": [], "hp": 3, "flow": {"a": "\\u001b[2J"}, "values": 1}'
    ),
    "deep": lambda run: (run / "settings.json").write_text("[" * 100_000),
    "no rights": lambda run: (run / "settings.json").chmod(0),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_the_readable_part_of_a_damaged_run_is_shown(called, runs, damage):
    shutil.copytree(runs / "ppo-1", runs / "whole")
    damage(runs / "ppo-1")
    for words in (["runs"], ["show", "ppo-1"], ["watch", "ppo-1"], ["watch", "ppo-1", "--once"]):
        code, out, err = called(*words)
        assert (code in (0, 1), err) == (True, ""), words
        assert "ppo-1" in out
        assert "\x1b" not in out
    assert line_of(called("runs")[1], "whole")[2] == "done"


def test_show_prints_a_run_from_its_settings_to_its_files(called, runs):
    evaluate(runs / "ppo-1", 0, 0.25)
    evaluate(runs / "ppo-1", 3, 0.75)
    (runs / "ppo-1" / "notes.txt").write_text(
        "".join(f"note {i}\n" for i in range(14)) + "last \x1b[2J note\n"
    )
    code, out, _ = called("show", "ppo-1")
    assert code == 0
    for part in (
        "runs/ppo-1  ppo  done  3/3 iterations",
        "max_tokens 4",
        "backend null",
        "seed 0",
        "+50.0 points",
        "held-out accuracy after iterations",
        "0.75 ┤",
        "reward  ",
        "trained on ",
        "last iteration: reward 0.",
        "slowest nodes: ",
        "… 5 more in notes.txt",
        "last \\x1b[2J note",
        "metrics.jsonl (all metrics)",
        "final (trained models)",
    ):
        assert part in out, part
    assert called("show", runs / "ppo-1")[1].splitlines()[1:] == out.splitlines()[1:]


def test_show_includes_the_error_of_a_run(called, runs):
    status.write(
        runs / "ppo-1",
        replace(status.begun("ppo", 3), state="failed", error="stage 'gae' failed in iteration 2"),
    )
    assert "error: stage 'gae' failed in iteration 2" in called("show", "ppo-1")[1]
    code, out, _ = called("watch", "ppo-1")
    assert code == 1
    assert "ppo-1: failed after 3 of 3 iterations: stage 'gae' failed" in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["show", "ppo-2"], ["there is no run 'ppo-2'", "nearest:  ppo-1"]),
        (["watch", "runs/pppo-1"], ["there is no run", "nearest:  runs/ppo-1"]),
        (["show", "other"], ["'other' is not the folder of a run"]),
        (["watch", "other"], ["'other' is not the folder of a run"]),
        (["runs", "rums"], ["the folder 'rums' does not exist", "nearest:  runs"]),
        (["runs", "runs/ppo-1/settings.json"], ["does not exist"]),
        (["show", "nul\0l"], ["there is no run"]),
    ],
    ids=lambda words: "-".join(words).replace("\0", "") if isinstance(words, list) else None,
)
def test_a_missing_run_is_reported_with_the_nearest_name(called, runs, words, says):
    (runs.parent / "other").mkdir()
    code, _, err = called(*words)
    assert code == 2
    assert [part for part in says if part not in err] == []


def test_an_empty_folder_has_no_runs(called, tmp_path):
    (tmp_path / "runs").mkdir()
    assert called("runs")[:2] == (0, "no runs in runs\n")


def test_watch_prints_lines_as_they_come_and_ends_with_the_run(runs, capsys):
    """The run grows while it is followed: an incomplete line is not printed, a complete line is printed
    once."""
    run = runs / "ppo-1"
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    begun = status.begun("ppo", 3)
    (run / "metrics.jsonl").write_bytes(lines[0])
    status.write(run, begun)

    def steps():
        yield (run / "metrics.jsonl").write_bytes(lines[0] + lines[1][:20])
        yield (run / "metrics.jsonl").write_bytes(lines[0] + lines[1])
        evaluate(run, 2, 0.5)
        yield
        (run / "metrics.jsonl").write_bytes((run / "metrics.jsonl").read_bytes() + lines[2])
        yield status.write(run, replace(begun, state="done", iteration=3))

    step = steps()
    found = follow(
        run, Plain(sys.stdout, clock=iter(range(0, 1000, 10)).__next__), lambda seconds: next(step)
    )
    out = capsys.readouterr().out
    assert (found.state, found.iteration) == ("done", 3)
    assert re.findall(r"^ +(\d)/3|after (2) iterations: sampled 50", out, re.MULTILINE) == [
        ("1", ""),
        ("2", ""),
        ("", "2"),
        ("3", ""),
    ]


def test_watch_on_a_terminal_ends_cleanly_on_ctrl_c(terminal, on_terminal, runs):
    status.write(runs / "ppo-1", replace(status.begun("ppo", 9), iteration=3))
    process = on_terminal("watch", "ppo-1")
    terminal.wait_for("actor.generate")
    terminal.wait_for("3/9")
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(60) == 130
    seen = terminal.end()
    assert seen.count("\x1b[?25l") == seen.count("\x1b[?25h") == 1
    assert "Traceback" not in seen
    assert "interrupted" not in seen  # the run continues


def test_watch_once_prints_one_view(called, runs):
    evaluate(runs / "ppo-1", 3, 0.5)
    code, out, _ = called("watch", "ppo-1", "--once")
    assert code == 0
    for part in ("3/3 iterations", "done", "reward 0.", "accuracy 50.0% (after 3)", "actor.generate"):
        assert part in out


DOCTOR = """
import sys
from rlflow.cli.watch import print_doctor
code = print_doctor()
print({"torch", "transformers", "wandb", "mlflow"} & set(sys.modules))
sys.exit(code)
"""


@pytest.mark.slow
def test_doctor_lists_packages_and_listening_sockets(tmp_path):
    server = (
        "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], "
        "flush=True); sys.stdin.read()"
    )
    words = [sys.executable, "-c", server, "rlflow"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        port = process.stdout.readline().strip()
        done = subprocess.run(
            [sys.executable, "-c", DOCTOR], capture_output=True, text=True, cwd=tmp_path, timeout=240
        )
        process.communicate("")
    assert done.returncode == 0, done.stderr
    lines = [line.strip() for line in done.stdout.splitlines()]
    for start in (
        "rlflow 0.",
        "python 3.",
        "torch 2.",
        "transformers ",
        "reasoning-gym",
        "math-verify",
        "datasets",
        "ray",
        "local: trains and samples",
        "vllm: ",
        "tensorboard ",
        "wandb ",
        "mlflow",
        "cores: ",
        "memory: ",
        "GPU: ",
    ):
        assert any(line.startswith(start) for line in lines), start
    assert any(line.startswith(f"127.0.0.1:{port}  this machine only  pid {process.pid}") for line in lines)
    assert lines[-1] == "set()"  # no heavy module was imported


def test_doctor_shows_where_a_run_on_pools_would_listen():
    lines = reach([Interface("lo", "127.0.0.1"), Interface("ib0", "10.7.0.3"), Interface("eth0", "8.8.4.4")])
    assert "127.0.0.1: reachable for users of this machine; Ray requires its token" in lines[0]
    assert lines[2:] == [
        "  lo 127.0.0.1: users of this machine",
        "  ib0 10.7.0.3: everyone on this private network",
        "  eth0 8.8.4.4: the internet: refused without --insecure true",
    ]
    assert any(line.startswith("  lo 127.0.0.1") for line in reach())


def test_doctor_checks_that_rays_token_is_private(tmp_path, monkeypatch):
    token = tmp_path / "auth_token"
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    assert token_line().startswith(f"{token}: no token yet")
    token.write_text("secret")
    token.chmod(0o644)
    assert token_line() == f"{token}: other users can read it (644): chmod 600 {token}"
    token.chmod(0o600)
    assert token_line() == f"{token}: private"
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert token_line().startswith("not required: RAY_AUTH_MODE=disabled")


def test_a_missing_process_or_reused_pid_counts_as_dead(tmp_path):
    status.write(tmp_path, status.begun("ppo", 3))
    mine = status.read(tmp_path)
    assert mine.state == "running"
    assert mine.process == Process.this()

    def state(**changes):
        status.write(tmp_path, replace(mine, process=replace(mine.process, **changes)))
        return status.read(tmp_path).state

    assert state(started="1") == "died"
    assert state(boot="earlier") == "died"
    assert state(host="elsewhere", boot="its own", pid=1, started="1") == "running"
    assert state(space="of another container", pid=1, started="1") == "running"
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        started = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert state(pid=process.pid, started=started) == "died"  # it only waits to be reaped


def test_a_status_is_complete_or_absent(tmp_path):
    status.write(tmp_path, status.begun("ppo", 3))
    kept, before = (tmp_path / "status.json").read_text(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, before[1]))  # like a full disk
    try:
        with pytest.raises(OSError, match="File too large"):
            status.write(tmp_path, status.begun("ppo", 4))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]
    assert (tmp_path / "status.json").read_text() == kept


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([], ""),
        ([1.0], "▁"),
        ([0.0, 1.0], "▁█"),
        ([3.0, 3.0], "▁▁"),
        (list(range(8)), "▁▂▃▄▅▆▇█"),
        ([0.0] * 100 + [1.0] * 100, "▁" * 5 + "█" * 5),
    ],
)
def test_a_sparkline_spans_the_lowest_and_highest_value(values, line):
    assert sparkline(values, width=10) == line


def test_settings_of_roles_are_shown_as_the_run_recorded_them(tmp_path):
    values = {
        "model": "base",
        "hp.samples": 4,
        "actor.lr": 1e-5,
        "actor.generator": "vllm",
        "critic.lr": 1e-4,
    }
    (tmp_path / "settings.json").write_text(
        json.dumps({"hp": {"samples": 4}, "options": {"model": "base"}, "values": values})
    )
    assert str(settings(tmp_path)).splitlines() == [
        "hp: samples 4",
        "run: model base",
        "actor: lr 1e-05  generator vllm",
        "critic: lr 0.0001",
    ]
