"""A run whose model and data come from a Hub on loopback: pinned, resumed at the same commits, without
secrets in its files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hub_server import TOKEN, Hub, serving

import rlflow.data.tasks

MODEL = Path(next(iter(rlflow.data.tasks.__path__))) / "arithmetic_model"
CARD = "---\nconfigs:\n- {config_name: main, data_files: main.jsonl}\n- {config_name: more, data_files: more.jsonl}\n---\n"


def lines(count):
    return "".join(json.dumps({"question": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(count))


@pytest.mark.long
def test_a_run_keeps_the_commits_that_it_was_started_with(tmp_path):
    def rlflow(*words):
        given = {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN}
        done = subprocess.run(
            [sys.executable, "-m", "rlflow.cli.main", *words],
            cwd=tmp_path,
            env={**os.environ, **given},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert TOKEN not in done.stdout + done.stderr
        return done.stdout

    with serving(Hub()) as hub:
        repository = hub.model("org/tiny", MODEL)
        repository.gated = True
        hub.dataset("org/sums", {"README.md": CARD, "main.jsonl": lines(64), "more.jsonl": lines(8)})
        model, data = (each.refs["main"] for each in hub.repositories.values())
        command = ["run", "grpo", "--model", "org/tiny", "--data", "org/sums:main", "--reward", "task"]
        command += ["--eval", "more=org/sums:more", "--prompts", "4", "--hp.samples", "2", "--held-out", "4"]
        command += ["--name", "one", "--resume", "auto", "--hp.max_tokens", "4"]
        first = rlflow(*command, "--iterations", "1")
        assert f"org/tiny@{model[:12]} of the Hub, 947K parameters in float32 (3.8 MB)" in first
        moved = repository.commit({**repository.commits[model], "README.md": "changed"})
        rlflow(*command, "--iterations", "2")
        assert hub.asked(f"{moved}/model.safetensors") == 0
    run = tmp_path / "runs" / "one"
    kept = json.loads((run / "identity.json").read_bytes())["kept"]
    assert (kept["actor: commit"], kept["data org/sums:main: commit"]) == (f"org/tiny@{model}", data)
    values = json.loads((run / "settings.json").read_bytes())["values"]
    assert (values["model"], values["data"]) == (f"org/tiny@{model}", [f"org/sums@{data}:main"])
    assert values["eval"] == [f"more=org/sums@{data}:more"]
    assert (run / "metrics.jsonl").read_text().count('"reward/mean"') == 2, "both iterations"
    assert not [path for path in run.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]
