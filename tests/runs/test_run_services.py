"""Runs with services, started as a user starts them."""

import json
import sys

import pytest
from sources import ROOT, TESTS

import rlflow
from rlflow.cli.main import exit_code
from rlflow.config.flags import read_toml
from rlflow.errors import PlanError
from rlflow.monitoring.reporter import Quiet
from rlflow.runs import resume, trust

LITTLE = f"{sys.executable} {TESTS / 'services' / 'little.py'} {{port}}"
FLAGS = {
    "backend": "null",
    "prompts": 4,
    "iterations": 2,
    "held_out": 0,
    "hp.samples": 2,
    "reward": "{judge}/get_reward",
    "save_every": 1,
}


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_with_a_service_reward_resumes_on_another_port(tmp_path):
    result = rlflow.run("grpo", out=str(tmp_path), **FLAGS, **{"service.judge": LITTLE})
    values = json.loads((result.folder / "settings.json").read_text())["values"]
    assert (values["reward"], values["service.judge"]) == (["{judge}/get_reward"], LITTLE)
    first = json.loads((result.folder / "services.json").read_text())
    assert [(each["name"], each["state"], each["log"]) for each in first] == [
        ("judge", "ended", "services/judge.log")
    ]
    with pytest.raises(PlanError, match="a service's command, which rlflow cannot check"):
        resume.resume(result.folder, {"iterations": 3}, Quiet())
    with pytest.raises(PlanError, match="changes to .* to services except for their commands"):
        resume.resume(result.folder, {"iterations": 3, "service.judge": "other"}, Quiet())
    resume.resume(
        result.folder, {"iterations": 3, "service.judge": LITTLE, "service.judge.wait": 30}, Quiet()
    )
    assert [line["reward/mean"] for line in lines(result.folder)] == [1.0] * 3
    assert {path.name for path in (result.folder / "services").iterdir()} == {"judge.log", "judge.2.log"}


def test_a_failing_service_ends_the_command_without_a_folder(tmp_path, capfd):
    flags = [word for name, value in FLAGS.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    code = exit_code(
        ["run", "grpo", *flags, "--out", str(tmp_path / "runs"), "--service.judge", f"{LITTLE} --fails"]
    )
    assert code == 2
    assert "its last output:\n    the little service begins\n    it has no corpus" in capfd.readouterr().err
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize("command", ["check", "plan"])
def test_check_validates_a_declaration_without_starting_it(command, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [command, "grpo", "--backend", "null", "--reward", "{judge}/get_reward"]
    assert exit_code([*words, "--service.judge", "no-such-program", "--service.judge.gpus", "2"]) == 0
    if command == "plan":
        assert "services\n  judge: no-such-program, 2 GPUs\n" in capfd.readouterr().out
    assert exit_code([*words, "--service.judge", "serve", "--service.judge.wiat", "3"]) == 2
    assert "nearest:  wait" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_missing_gpu_is_refused_before_loading(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(PlanError, match="service 'judge' needs 1 GPU"):
        rlflow.run("grpo", out=str(tmp_path), **FLAGS, **{"service.judge": LITTLE, "service.judge.gpus": 1})


ASKING = """
import json, urllib.request
from dataclasses import dataclass

from rlflow import flow, loss, row, stage

@dataclass(frozen=True)
class Asking:
    judge: str = "http://nobody.invalid"  # where answers are judged
    asks: str = "{question}?"  # a text with a brace that names no service

@stage(gives={"share": row("float32")})
def judged(completion, *, judge, asks):
    body = json.dumps({"query": completion}).encode()
    with urllib.request.urlopen(urllib.request.Request(judge, body)) as answer:
        scores = json.load(answer)["rewards"]
    return scores, {"score": sum(scores) / len(scores), "braces": float(asks == "{question}?")}

@loss
def likelihood(new, share: row("float32")):
    return -new.logprobs * share[:, None], {}

@flow
def asking(prompts, actor, hp=Asking()):
    batch = actor.generate(prompts, samples=2, max_tokens=4)
    batch |= judged(batch, judge=hp.judge + "/get_reward", asks=hp.asks)
    actor.update(batch, likelihood)
"""


@pytest.fixture
def asking(tmp_path):
    """A flow with a stage that calls a judge, and a configuration with the judge's address."""
    (tmp_path / "asking.py").write_text(ASKING)
    flags = "".join(
        f"{name} = {json.dumps(FLAGS[name])}\n"
        for name in ("backend", "prompts", "iterations", "held_out", "save_every")
    )
    (tmp_path / "run.toml").write_text(
        f"{flags}out = '{tmp_path}'\n[hp]\njudge = '{{judge}}'\n[service.judge]\nrun = '{LITTLE}'\n"
    )
    return tmp_path


def test_a_stage_gets_the_url_of_the_service_in_its_setting(asking):
    words = [str(asking / "asking.py"), "--config", str(asking / "run.toml")]
    assert [exit_code([command, *words]) for command in ("check", "plan", "graph")] == [0, 0, 0]
    result = rlflow.run(str(asking / "asking.py"), **read_toml(asking / "run.toml"))
    saved = json.loads((result.folder / "settings.json").read_text())
    assert saved["hp"]["judge"] == "{judge}"
    assert "127.0.0.1" not in json.dumps(saved["hp"])
    # on another port, with the same graph
    resume.resume(result.folder, {"iterations": 3, "service.judge": LITTLE}, Quiet())
    assert [(line["judged/score"], line["judged/braces"]) for line in lines(result.folder)] == [
        (1.0, 1.0)
    ] * 3
    with rlflow.roles(str(asking / "asking.py"), **read_toml(asking / "run.toml")) as roles:
        flow = roles.prepared.plan.program.flow
        assert roles["hp"].judge.startswith("http://127.0.0.1:")
        flow(roles.take(), **roles)


@pytest.mark.parametrize("pools", ["all=1@threads", pytest.param("all=1", marks=pytest.mark.long)])
def test_pool_workers_also_find_services(asking, pools):
    (asking / "mine.py").write_text(REWARD)
    flags = {**FLAGS, "reward": f"{asking / 'mine.py'}:asks", "reward_network": True, "pools": pools}
    result = rlflow.run("grpo", out=str(asking), **flags, **{"service.judge": LITTLE})
    assert [line["reward/mean"] for line in lines(result.folder)] == [1.0] * 2
    result = rlflow.run(str(asking / "asking.py"), **{**read_toml(asking / "run.toml"), "pools": pools})
    assert [line["judged/score"] for line in lines(result.folder)] == [1.0] * 2


REWARD = """
import json, os, urllib.request

def asks(prompt, completion):
    body = json.dumps({"query": [completion]}).encode()
    with urllib.request.urlopen(urllib.request.Request(os.environ["RLFLOW_SERVICE_JUDGE"] + "/get_reward", body)) as answer:
        return json.load(answer)["rewards"][0]
"""


def test_the_command_of_a_foreign_service_is_named(tmp_path):
    (tmp_path / "mine.py").write_text(REWARD)
    saved = {"file": str(ROOT / "algorithms" / "grpo.py"), "flow": "grpo"}
    values = {
        "service.own": "python judge.py",
        "service.far.run": "http://far",
        "service.bm25": "rlflow serve retrieve corpus.jsonl",
        "service.judge": f"rlflow serve reward --reward {tmp_path}/mine.py:asks",
        "service.own.wait": 3,
    }
    assert list(trust.commands(values)) == ["python judge.py"]
    assert (tmp_path / "mine.py").resolve() in list(trust.named_files(saved, values))
