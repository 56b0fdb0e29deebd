"""Code written by a model runs, and can only compute."""

import pytest

from rlflow.processes.sandbox import probe
from rlflow.rewards.environments.environment_pool import EnvironmentPool
from rlflow.rewards.environments.environment_spec import parse_environment
from rlflow.rewards.environments.shipped.python import Python

pytestmark = pytest.mark.slow  # whole runs, models or processes: each test is short, all together are not


def output(code, **settings):
    turn = Python(**settings).step(f"I compute.\n```python\n{code}\n```")
    assert turn.says.startswith("\n```output\n")
    assert turn.says.endswith("\n```\n")
    return turn.says[len("\n```output\n") : -len("\n```\n")]


def test_the_output_of_code_is_returned_and_a_turn_without_code_ends():
    episode = Python()
    assert (
        episode.step("```python\nprint(6 * 7)\n```\nor\n```python\nprint(1)\n```").says
        == "\n```output\n1\n```\n"
    )
    last = episode.step("It is 1.")
    assert (last.done, last.says, dict(last.log)) == (True, "", {"blocks": 1})


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("print('a')\n1 / 0", "a\nZeroDivisionError: division by zero"),
        ("1 +", "SyntaxError: invalid syntax"),
        ("raise SystemExit(3)", ""),
        ("while True: pass", "TimeoutError: not finished after 1 s"),
        ("x = bytearray(1 << 30)", "MemoryError"),
        ("import socket; socket.socket()", "PermissionError"),
        ("open('/tmp/gone', 'w')", "PermissionError"),
        ("open('here', 'w')", "PermissionError"),
        ("open('/etc/passwd')", "PermissionError"),
        ("import subprocess; subprocess.run(['ls'])", "PermissionError"),
        ("import os; os.fork()", "PermissionError"),
        ("import os; os.kill(os.getppid(), 9)", "PermissionError"),
        ("import os; os.kill(os.getpid(), 9)", ""),
        ("print('x' * 5000)", "x" * 100),
    ],
)
def test_code_can_only_compute(code, says):
    said = output(code, timeout=1.0 if "while" in code else 60.0, prints=100)
    assert says in said if says else "Error" not in said or "Permission" in said
    assert len(said) <= 100 or "Error" in said


def test_code_does_not_see_the_variables_of_the_run(monkeypatch):
    monkeypatch.setenv("SECRET_OF_MINE", "1")
    pool = EnvironmentPool(parse_environment("python", {"parallel": "1"}))
    try:
        episodes, _ = pool.open([{}], [0])
        (answer,) = pool.step(
            episodes, ["```python\nimport os\nprint('SECRET_OF_MINE' in os.environ, 2 ** 10)\n```"]
        )
        assert answer["says"] == "\n```output\nFalse 1024\n```\n"
    finally:
        pool.close()


def test_only_the_beginning_of_long_output_is_kept():
    assert len(Python(timeout=60.0).run("print('x' * (3 << 20))")) == 1 << 20


def test_code_runs_without_isolation_only_on_request(monkeypatch):
    monkeypatch.setattr(probe, "missing", lambda kind: ("reading",))
    with pytest.raises(ValueError, match="cannot restrict reading .* --env.unsafe true"):
        Python()
    assert "2" in output("print(1 + 1)", unsafe=True)
