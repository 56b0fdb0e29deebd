"""Secrets placed everywhere a run can meet them; the tests search its output, its files and its process list
for them."""

import json
import os
import subprocess
import sys

import pytest
from run_faults import command

import rlflow
from rlflow.errors import PlanError
from rlflow.monitoring.reporter import Quiet
from rlflow.runs.resume import resume

pytestmark = pytest.mark.slow  # whole runs, models or processes: each test is short, all together are not

WEIGHT_CHECK = "kanarie-7d1f3b9a{}"
BY_NAME = (
    "WANDB_API_KEY",
    "HF_TOKEN",
    "MY_SECRET",
    "DB_PASSWORD",
    "AWS_SECRET_ACCESS_KEY",
    "GITHUB_PAT",
    "DB_PASS",
    "AWS_AUTH",
    "MYSQL_PWD",
    "SERVICE_BEARER",
    "PGPASSWORD",
)
# of the environment
BY_SHAPE = {
    "SOME_NOTE": "ghp_kanarieShape0123456789abcdefghijklmn",
    "OTHER": "sk-kanarie-shape-0123456789abcdefg",
}
LINES = (
    "-----BEGIN PRIVATE "
    "KEY-----\nkanarieMIIEvQIBADANBgkqhkiG9w0BAQ\nkanarieEvQIBADANBgkqhkiG9w0BAQEF\n-----END PRIVATE "
    "KEY-----"
)
PLANTED = (
    {name: WEIGHT_CHECK.format(f"{number:02}") for number, name in enumerate(BY_NAME)}
    | BY_SHAPE
    | {"SSH_PRIVATE_KEY": LINES}
)
TELLS = '''
import os, sys, warnings
from dataclasses import dataclass
from pathlib import Path
from rlflow import RANK0, flow, loss, stage

@dataclass(frozen=True)
class Settings:
    api_key: str = "none"
    db_pass: str = "none"
    note: str = ""
    fails: bool = False
    samples: int = 2

@stage(gives="advantages", dispatch=RANK0)
def tell(scores, mask, *, api_key, db_pass, note, fails):
    everything = [api_key, db_pass, note, *(os.environ.get(name, "") for name in NAMES)]
    print("a stage prints", *everything)
    print("and says", *everything, file=sys.stderr)
    with warnings.catch_warnings(action="always"):
        warnings.warn(" ".join(everything))
    if os.environ.get("SEEN"):
        with open(os.environ["SEEN"], "a") as file:
            file.write("".join(f"{line}\\n" for line in seen()))
    if fails:
        raise ValueError(" and ".join(everything))
    return scores[:, None] * mask

def seen():
    """What other processes show of themselves, and what Ray keeps."""
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield from ("looked", f"{entry} {entry.read_bytes()}"[: 10**5] if b"kanarie" in entry.read_bytes() else "")
        except OSError:
            pass
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        for path in Path(ray._private.worker._global_node.get_session_dir_path()).rglob("*"):
            if path.is_file():
                yield from ("kept", f"{path}" if b"kanarie" in path.read_bytes() else "")

@loss
def simple(new, advantages):
    return -new.logprobs * advantages

@flow
def tells(prompts, actor, reward, hp=Settings()):
    batch = actor.generate(prompts, samples=hp.samples, max_tokens=4)
    batch |= reward(batch)
    batch |= tell(batch, api_key=hp.api_key, db_pass=hp.db_pass, note=hp.note, fails=hp.fails)
    actor.update(batch, simple)
'''.replace("NAMES", repr(tuple(PLANTED)))
JUDGE = """
import os
def told(completion):
    print(os.environ.get("MY_SECRET"), os.environ.get("SOME_NOTE"))
    raise ValueError(" ".join(os.environ.get(name, "gone") for name in {names}))
"""
CONFIG = f"[hp]\ndb_pass = '{WEIGHT_CHECK.format('toml')}'\n"
NOTE = (
    f"see {WEIGHT_CHECK.format('00')}, "
    f"https://me:{WEIGHT_CHECK.format('url')}@host/x?access_token={WEIGHT_CHECK.format('query')} and {BY_SHAPE['OTHER']}"
)
FLAGS = [
    "--hp.api_key",
    WEIGHT_CHECK.format("flag"),
    "--hp.note",
    NOTE,
    "--config",
    "config.toml",
    "--backend",
    "null",
    "--prompts",
    4,
    "--iterations",
    2,
    "--reward",
    "judge.py:told",
]


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """A folder with a flow, a reward and a configuration that read secrets from the environment; the folder's
    name and its git remote contain secrets too."""
    folder = tmp_path / PLANTED["GITHUB_PAT"]
    folder.mkdir()
    for name, value in PLANTED.items():
        monkeypatch.setenv(name, value)
    for name, text in (
        ("tells.py", TELLS),
        ("judge.py", JUDGE.replace("{names}", repr(tuple(PLANTED)))),
        ("config.toml", CONFIG),
    ):
        (folder / name).write_text(text)
    monkeypatch.chdir(folder)
    return folder


def leaks(folder):
    """Return the files that contain a secret."""
    return [
        str(path.relative_to(folder))
        for path in sorted(folder.rglob("*"))
        if path.is_file() and b"kanarie" in path.read_bytes()
    ]


def lines_with_secrets(said):
    """Return the printed lines that contain a secret. The folder's name is a secret and must be masked too."""
    return [line for line in (said.out + said.err).splitlines() if "kanarie" in line]


def test_secrets_reach_no_file_and_no_message(planted, tmp_path):
    """One run ends well although no row is scored, one has a failing stage, and one is refused."""
    out = ["--out", tmp_path / "runs"]
    well = command(["run", "tells.py", *FLAGS, *out, "--max-missing", 1], tmp_path / "well")
    fails = command(
        ["run", "tells.py", *FLAGS, *out, "--max-missing", 1, "--hp.fails", "true"], tmp_path / "fails"
    )
    refused = command(
        ["run", "tells.py", *FLAGS, *out, "--hp.api_key", WEIGHT_CHECK.format("twice")], tmp_path / "refused"
    )
    assert [well.code, fails.code, refused.code] == [0, 1, 2]
    assert "a stage prints *** *** see ***, https://me:***@host/x?access_token=*** and ***" in well.out
    assert "stage 'tell' failed in iteration 0 on 8 rows: ValueError: *** and *** and see ***" in fails.err
    assert [lines_with_secrets(said) for said in (well, fails, refused)] == [[], [], []]
    assert leaks(tmp_path / "runs") == []
    assert len([path for path in (tmp_path / "runs").rglob("*") if path.is_file()]) > 20
    assert "***" in (tmp_path / "runs" / "tells-2" / "status.json").read_text()


def test_other_commands_print_no_secrets(planted, tmp_path):
    (planted / "broken.py").write_text(f"raise RuntimeError({PLANTED['DB_PASS']!r})\n" + TELLS)
    words = FLAGS[:6]
    graph = ["graph", "tells.py", "--format", "json", *words]
    plan = ["plan", "tells.py", *words, "--backend", "null"]
    for arguments in (
        ["graph", "tells.py", *words],
        graph,
        plan,
        ["check", "tells.py", *words],
        ["check", "broken.py"],
        ["run", "broken.py"],
    ):
        said = command(arguments, tmp_path / "said")
        assert said.out + said.err
        assert lines_with_secrets(said) == [], arguments
    assert "***" in json.dumps(json.loads(command(graph, tmp_path / "said").out))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_resumed_run_gets_its_secrets_again(tmp_path):
    (tmp_path / "tells.py").write_text(TELLS)
    keywords = {
        "backend": "null",
        "prompts": 4,
        "iterations": 1,
        "out": str(tmp_path),
        "name": "told",
        "hp.api_key": WEIGHT_CHECK,
    }
    rlflow.run(f"{tmp_path}/tells.py", **keywords)
    with pytest.raises(PlanError, match="did not record --hp.api_key, because it is a secret"):
        resume(tmp_path / "told", {"iterations": 2}, Quiet())
    assert resume(tmp_path / "told", {"iterations": 2, "hp.api_key": WEIGHT_CHECK}, Quiet()).iterations == 2


@pytest.mark.parametrize(
    "where",
    [
        pytest.param([], id="one process", marks=pytest.mark.slow),
        pytest.param(["--pools", "all=1"], id="pools", marks=pytest.mark.long),
    ],
)
def test_a_run_with_trackers_and_ray_shows_no_secrets(planted, tmp_path, where):
    """The stage itself reads the process table and Ray's logs."""
    subprocess.run(
        "git init -q . && git remote add origin https://me:kanarie-git-remote@host/x.git",
        shell=True,
        check=True,
    )
    words = ["run", "tells.py", *FLAGS, *where, "--out", tmp_path / "runs", "--max-missing", 1]
    words += ["--track", "tensorboard", "--track", "wandb", "--track", "mlflow"]
    environment = {
        **os.environ,
        "SEEN": str(tmp_path / "seen"),
        "WANDB_MODE": "offline",
        "HOME": str(tmp_path / "home"),
    }
    done = subprocess.run(
        [sys.executable, "-m", "rlflow.cli.main", *map(str, words)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (tmp_path / "seen").read_text().splitlines()
    assert lines.count("looked") > 4
    assert bool(where) == ("kept" in lines)
    assert [line for line in lines if line not in ("", "looked", "kept")] == []
    assert [line for line in (done.stdout + done.stderr).splitlines() if "kanarie" in line] == []
    assert leaks(tmp_path / "runs") == []
    assert {path.name for path in (tmp_path / "runs").iterdir()} >= {"tells-1", "mlruns"}
    assert {"wandb", "tensorboard"} <= {path.name for path in (tmp_path / "runs" / "tells-1").iterdir()}
    for more in (
        ["show", tmp_path / "runs" / "tells-1"],
        ["runs", tmp_path / "runs"],
        ["watch", "--once", tmp_path / "runs" / "tells-1"],
        ["doctor"],
    ):
        said = command(more, tmp_path / "said")
        assert lines_with_secrets(said) == [], more
