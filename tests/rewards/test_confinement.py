"""Reward processes see and change only their own files, unless the user allows more. Payloads score
nothing."""

import json
import os
import socket
from pathlib import Path

import payloads
import pytest

from rlflow import Batch, PlanError
from rlflow.data import gym
from rlflow.processes.sandbox import kernel, probe
from rlflow.rewards import RewardPool, bind, parse_reward, plain
from rlflow.rewards.confinement import Confinement
from rlflow.rewards.reward_pool import _verdict
from rlflow.rewards.worker_pool import Died, WorkerProcess

pytestmark = pytest.mark.slow  # whole runs, models or processes: each test is short, all together are not

SEEING = '''
import json, os, resource, socket, sys, urllib.request
from pathlib import Path

import beside

def see(completion):
    """What a completion asks for, in the text of an error."""
    raise LookupError(json.dumps(ACTIONS[completion]()))

def judge(completion):
    return float(ACTIONS[completion]() is not None)

def plan(completion):
    return float(completion)

def connect():
    with socket.create_connection(("127.0.0.1", int(Path(__file__).with_name("port").read_text()))) as line:
        return line.fileno()

def grow():
    blocks = [bytearray(1 << 24) for _ in range(1 << 10)]
    return len(blocks)

ACTIONS = {
    "environment": lambda: dict(os.environ), "folder": lambda: [os.getcwd(), os.listdir(), os.environ["HOME"], os.environ["TMPDIR"]],
    "files": lambda: [os.readlink(f"/proc/self/fd/{d}") for d in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{d}")],
    "core": lambda: resource.getrlimit(resource.RLIMIT_CORE), "beside": lambda: beside.VALUE,
    "outside": lambda: Path(__file__).with_name("made").write_text("x"), "own": lambda: Path("made").write_text("x"),
    "connect": connect, "page": lambda: urllib.request.urlopen("http://127.0.0.1:9"), "key": lambda: os.environ["SOME_API_KEY"],
    "relative": lambda: open("beside.py"), "grow": grow, "signal": lambda: os.kill(os.getppid(), 0),
    "rights": lambda: Path("/proc/self/status").read_text(),
    "parent": lambda: Path(f"/proc/{os.getppid()}/environ").read_text(),
}
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seeing")
    (folder / "seeing.py").write_text(SEEING)
    (folder / "beside.py").write_text("VALUE = 3\n")
    return folder / "seeing.py"


@pytest.fixture(scope="module")
def pool():
    with RewardPool(1) as pool:
        yield pool


def scored(pool, file, *completions, function="judge"):
    (reward,) = bind([parse_reward(f"{file}:{function}")], pool)
    return reward.score(Batch.of(completion=list(completions)))


def inspect_process(pool, file, what):
    seen = scored(pool, file, what, function="see").first["raised"]
    assert seen.type == "LookupError", seen
    return json.loads(seen.text)


def why(pool, file, what):
    return str(scored(pool, file, what).first["raised"])


def test_a_reward_sees_only_allowed_environment_keys(file, monkeypatch):
    for name in ("SOME_API_KEY", "HTTPS_PROXY", "AWS_PROFILE", "RLFLOW_ELSE"):
        monkeypatch.setenv(name, "canary")
    monkeypatch.setenv("LC_TIME", "C")
    with RewardPool(1) as pool:
        strict = inspect_process(pool, file, "environment")
        assert "reward-env NAME" in why(pool, file, "key")
    assert {"PATH", "HOME", "LC_TIME", "PYTHONHASHSEED", "OMP_NUM_THREADS"} <= set(strict)
    assert "canary" not in strict.values()
    with RewardPool(1, Confinement(variables=("SOME_API_KEY",))) as pool:
        assert [
            name for name, value in inspect_process(pool, file, "environment").items() if value == "canary"
        ] == ["SOME_API_KEY"]


def test_modules_on_a_relative_path_are_found_from_another_folder(file, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "tests")
    with RewardPool(1) as pool:
        assert inspect_process(pool, file, "environment")["PYTHONPATH"] == str(Path.cwd() / "tests")


def test_a_reward_works_in_a_temporary_folder_of_its_own(file):
    with RewardPool(1) as pool:
        folder, inside, home, temporary = inspect_process(pool, file, "folder")
        assert (inside, home, temporary) == ([], folder, folder)
        assert Path(folder).stat().st_mode & 0o777 == 0o700
        assert scored(pool, file, "own").values.tolist() == [1]
        assert Path(folder, "made").exists()
    assert not Path(folder).exists()


def test_a_reward_has_no_open_file_of_its_driver(pool, file):
    with open(file) as held:
        os.set_inheritable(held.fileno(), True)
        with RewardPool(1) as fresh:
            open_files = inspect_process(fresh, file, "files")
    assert {each.partition(":")[0] for each in open_files} <= {"pipe", "/dev/null"}


def test_a_reward_finds_files_next_to_its_own(pool, file):
    assert inspect_process(pool, file, "beside") == 3
    assert "Path(__file__).parent" in why(pool, file, "relative")


walled = pytest.mark.skipif(kernel.landlock_version() == 0, reason="this kernel has no Landlock")


@walled
def test_a_reward_changes_files_only_in_allowed_folders(pool, file):
    assert "--reward-write" in why(pool, file, "outside")
    assert not file.with_name("made").exists()
    with RewardPool(1, Confinement(folders=(str(file.parent),))) as allowed:
        assert scored(allowed, file, "outside").values.tolist() == [1]
    file.with_name("made").unlink()
    with RewardPool(1, Confinement(folders=("/",))) as allowed:
        assert scored(allowed, file, "outside").values.tolist() == [1]
    file.with_name("made").unlink()


@walled
def test_a_reward_cannot_inspect_or_signal_processes(pool, file):
    assert "PermissionError" in why(pool, file, "parent")
    if kernel.landlock_version() >= 6:
        assert "PermissionError" in why(pool, file, "signal")


def test_a_reward_has_the_network_if_allowed(pool, file):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        file.with_name("port").write_text(str(listener.getsockname()[1]))
        assert "--reward-network true" in why(pool, file, "connect")
        assert "--reward-network true" in why(pool, file, "page")
        with RewardPool(1, Confinement(network=True)) as allowed:
            assert scored(allowed, file, "connect").values.tolist() == [1]


def test_a_reward_that_uses_too_much_memory_loses_its_row(file):
    with RewardPool(1, Confinement(memory=1 << 30)) as pool:
        scores = scored(pool, file, "beside", "grow", "beside")
    assert scores.values[[0, 2]].tolist() == [1, 1]
    assert "MemoryError" in str(scores.first["raised"])


def test_a_reward_leaves_no_core_dump_and_gains_no_rights(pool, file):
    assert inspect_process(pool, file, "core") == [0, 0]
    status = dict(line.split(":\t", 1) for line in seen_status(pool, file).splitlines() if ":\t" in line)
    assert status["NoNewPrivs"] == "1"
    assert int(status["CapEff"], 16) & ~kernel.OF_USERS == 0


def seen_status(pool, file):
    (reward,) = bind([parse_reward(f"{file}:see")], pool)
    first = reward.score(Batch.of(completion=["rights"])).first["raised"]
    return first.text.encode().decode("unicode_escape")


# -- replies
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "built_in", "verdict"),
    [
        (0.5, True, 0.5),
        (7.0, False, 7.0),
        (1.5, True, "type"),
        (-0.1, True, "type"),
        (["raised", "why"], True, "raised"),
        (["died", "why"], False, "died"),
    ],
)
def test_a_score_is_a_number_and_built_in_scores_are_0_to_1(reply, built_in, verdict):
    found = _verdict(reply, built_in)
    assert (found if isinstance(found, float) else found[0]) == verdict


@pytest.mark.parametrize(
    "reply",
    [
        float("nan"),
        float("inf"),
        1,
        True,
        "1.0",
        None,
        {},
        [],
        ["raised"],
        ["raised", 1],
        ["hacked", "why"],
        ["raised", "why", "more"],
    ],
)
def test_an_invalid_reply_counts_as_a_dead_process(reply):
    with pytest.raises(Died, match="not a score"):
        _verdict(reply, False)


# -- payloads
# ------------------------------------------------------------------------------------------------------------

SHORT = ("command", "scorer", "answer", "forged reply")
isolated = pytest.mark.skipif(probe.missing() != (), reason="this machine cannot isolate scorers")


@pytest.fixture
def marks(tmp_path, monkeypatch):
    monkeypatch.setenv(payloads.KEY, "canary")
    marks = payloads.Marks(tmp_path)
    yield marks
    marks.listener.close()


@pytest.mark.slow
@isolated
def test_programs_have_no_effect_in_evaluating_tasks(marks):
    with RewardPool(1) as pool:
        for task in plain.EVALUATING:
            few = marks.payloads(SHORT, ("{}",))
            found = list(
                payloads.judge(
                    pool, payloads.task_row(task), few[:2] if "integration" in task else few, timeout=240
                )
            )
            assert not [each for each in found if each.scored or each.neighbours], task
            assert not marks.acted(), task


def test_programs_have_no_effect_in_math_and_user_rewards(marks, tmp_path):
    with RewardPool(1) as pool:
        for row in (payloads.MATHS, payloads.user_row(tmp_path, "compared")):
            found = list(
                payloads.judge(pool, row, marks.payloads(SHORT, ("{}", "\\boxed{{{}}}")), timeout=240)
            )
            assert not [each for each in found if each.scored or each.neighbours]
            assert not marks.acted()


@walled
@pytest.mark.parametrize("name", ["file", "command", "socket", "grandparent's key"])
def test_a_reward_that_evaluates_text_acts_only_in_its_folder(marks, tmp_path, name):
    with RewardPool(1) as pool:
        row = payloads.user_row(tmp_path, "evaluated")
        scores = pool.score(
            row.scorer, ["completion", "answer"], [[each, ""] for each in marks.payloads((name,), ("{}",))]
        )
    assert [value for value in scores.values if value > 0] == []
    assert not marks.acted()


# the others take three times as long
SOONER = {"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"}


@isolated
@pytest.mark.parametrize(
    "task",
    [
        pytest.param(task, marks=pytest.mark.slow if task in SOONER else pytest.mark.long)
        for task in sorted(plain.EVALUATING)
    ],
)
def test_no_payload_in_any_form_acts_or_scores(marks, task):
    """Tasks that accept the same plain answers share the forms."""
    alike = [name for name, is_plain in plain.EVALUATING.items() if is_plain is plain.EVALUATING[task]]
    with RewardPool(1) as pool:
        shapes = payloads.SHAPES[alike.index(task) :: len(alike)]
        found = list(payloads.judge(pool, payloads.task_row(task), marks.payloads(shapes=shapes)))
    assert not [each for each in found if each.scored or each.neighbours]
    assert not marks.acted()


# -- without a sandbox
# ----------------------------------------------------------------------------------------------------------


def test_evaluating_tasks_are_refused_without_isolation(monkeypatch):
    monkeypatch.setattr(probe, "missing", lambda: ("files",))
    for task in ("countdown", "composite"):
        data = TaskData(gym.scorer(task, {}))
        with pytest.raises(PlanError, match=r"the sandbox cannot restrict files(.|\n)*--unsafe-scorers"):
            bind([parse_reward("task")], RewardPool(), data)
        assert bind([parse_reward("task")], RewardPool(), data, unsafe=True)
    assert bind([parse_reward("task")], RewardPool(), TaskData(gym.scorer("chain_sum", {})))


class TaskData:
    columns = gym.COLUMNS

    def __init__(self, scorer):
        self.scorer = scorer


def test_a_process_that_cannot_start_leaves_no_folder(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("sys.executable", str(tmp_path / "nothing"))
    with pytest.raises(FileNotFoundError):
        WorkerProcess()
    assert list(tmp_path.iterdir()) == []
