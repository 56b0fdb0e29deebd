"""`rlflow run` from a user's view: real processes, exit codes, output."""

import json
import os
import signal
import subprocess
import sys
from functools import partial

import pytest

import rlflow
from rlflow.author.load import load_flow
from rlflow.cli.main import exit_code
from rlflow.cli.run import packaged_note
from rlflow.runs.api import resolve_config

NULL = ["--backend", "null", "--iterations", "3", "--prompts", "4", "--hp.max_tokens", "4"]


def in_process(*words, cwd, **options):
    command = [sys.executable, "-m", "rlflow.cli.main", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, **options)


@pytest.mark.slow
def test_a_run_leaves_a_readable_folder(tmp_path):
    done = in_process("run", "ppo", *NULL, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert last.keys() == {
        "accuracy_before",
        "accuracy_after",
        "greedy_before",
        "greedy_after",
        "iterations",
        "seconds",
        "run",
        "unsaved",
        "bounds",
    }
    run = tmp_path / last["run"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [0, 1, 2]
    assert {"reward/mean", "actor.update/loss", "response/length"} <= lines[0].keys()
    settings = json.loads((run / "settings.json").read_text())
    assert (settings["options"]["seed"], settings["hp"]["max_tokens"], settings["options"]["backend"]) == (
        0,
        4,
        "null",
    )
    assert "actor.generate" in (run / "graph.txt").read_text()
    assert {event["name"] for event in json.loads((run / "timeline.json").read_text())} >= {
        "actor.generate",
        "reward",
        "gae",
    }
    assert (run / "samples.jsonl").read_text().count("\n") == 12
    assert (run / "final" / "actor").is_dir()
    assert "on the critical path" in done.stderr
    assert json.loads((run / "bounds.json").read_text()) == last["bounds"]
    assert (run / "bounds.txt").read_text() in done.stderr


@pytest.fixture
def called(monkeypatch, capsys, tmp_path):
    """Run a command in this process; return its exit code and output."""

    def call(*words):
        monkeypatch.chdir(tmp_path)
        return exit_code(list(words)), *capsys.readouterr()

    return call


@pytest.mark.parametrize(
    "words",
    [
        (["--hp.betta", "1"], "nearest:  --hp.beta"),
        (["--hp.beta", "-1"], "float >= 0"),
        (["--iterrations", "3"], "--iterations"),
        (["--acter.lr", "1"], "actor"),
        (["--actor.forwrad_seconds", "1"], "forward_seconds"),
        (["--name", "../elsewhere"], "single folder name"),
        (["--staleness", "1"], "one pool"),
        (["--pool", "all=2"], "--pool is given without --pools"),
        (["--ray-address", "127.0.0.1:1"], "without --pools"),
        (["--actor.trainer", "nul"], "no backend"),
        (["--seed"], "no value"),
        (["--config", "missing.toml"], "cannot be read"),
        (["--device", "cuda"], "no usable GPU"),
        (["--reward", "tusk"], "task"),
        (["--reward", "none.py:f"], "none.py"),
    ],
    ids=lambda words: words[0][0],
)
def test_an_impossible_run_is_reported_briefly_and_exits_with_2(tmp_path, called, words):
    flags, says = words
    code, out, err = called("run", "ppo", *NULL, *flags)
    assert code == 2, out + err
    assert says in err
    assert len(err.splitlines()) <= 12
    assert not (tmp_path / "runs").exists()


def test_a_missing_model_is_reported(called):
    code, _, err = called("run", "ppo", "--model", "no/such/folder", "--data", "chain_sum")
    assert code == 2
    assert "there is no model folder 'no/such/folder'" in err
    assert "name a model on the Hub: OWNER/NAME" in err


def test_a_taken_name_or_folder_is_reported_before_loading(tmp_path, called):
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "file").touch()
    code, out, err = called("run", "ppo", "--model", "nowhere", "--name", "mine")
    assert (code, out) == (2, "")
    assert "the run 'runs/mine' already exists" in err
    assert "rlflow resume runs/mine" in err
    assert "cannot write a run to 'file'" in called("run", "ppo", "--model", "nowhere", "--out", "file")[2]


def test_pools_without_ray_name_the_install_command(called, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    code, _, err = called("run", "ppo", *NULL, "--pools", "all=2")
    assert (code, err.splitlines()) == (
        2,
        [
            "the package 'ray' is not installed",
            "  expected: ray, from the extra 'cluster'",
            "  remedy:   pip install 'rlflow-dag[cluster]'",
        ],
    )
    assert called("plan", "ppo", *NULL, "--pools", "all=2")[0] == 0


@pytest.mark.parametrize(
    ("flow", "fields"),
    [("sft", "--data.completion FIELD"), ("dpo", "--data.chosen FIELD --data.rejected FIELD")],
)
def test_data_without_the_needed_responses_are_refused(tmp_path, called, flow, fields):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1 + 1 =", "answer": "2"}\n')
    code, _, err = called("run", flow, "--backend", "null", "--data", "prompts.jsonl")
    assert code == 2
    assert f"flow '{flow}' needs records with" in err
    assert fields in err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["graph", "ppo", "--hp.clip", "0.1", "--nonsense", "1"], "no flag --nonsense"),
        (["new", "class"], "cannot be the name of a flow"),
        (["resume", "nowhere"], "there is no run 'nowhere'"),
        (["export", "nowhere", "out"], "there is no run 'nowhere'"),
        (["rn"], "Did you mean 'run'"),
    ],
    ids=" ".join,
)
def test_other_commands_refuse_an_impossible_run(called, words, says):
    code, out, err = called(*words)
    assert (code, out) == (2, "")
    assert says in err


def test_the_version_is_printed(called):
    assert called("--version") == (0, f"rlflow {rlflow.__version__}\n", "")


@pytest.mark.slow
def test_a_closed_output_is_no_error(tmp_path):
    words = [
        sys.executable,
        "-c",
        "import sys; sys.argv = ['rlflow', 'graph', 'ppo']; from rlflow.cli.main import main; main()",
    ]
    with subprocess.Popen(
        words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.close()
        assert (process.stderr.read(), process.wait(60)) == ("", 1)


@pytest.mark.slow
def test_a_stage_that_raises_exits_1_with_its_place_and_shapes(tmp_path):
    (tmp_path / "own.py").write_text(
        "from rlflow import flow, loss, stage\n@stage(gives='advantages')\ndef broken(scores, mask):\n    "
        "raise ZeroDivisionError('\\x1b[31mno')\n@loss\ndef policy_loss(new, advantages):\n    return "
        "-new.logprobs * advantages, {}\n@flow\ndef own(prompts, actor, reward):\n    batch = "
        "actor.generate(prompts, samples=2, max_tokens=4)\n    batch |= reward(batch)\n    batch |= "
        "broken(batch)\n    actor.update(batch, policy_loss)\n"
    )
    done = in_process("run", "own.py", *NULL[:6], cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "own.py:12: stage 'broken' failed in iteration 0 on 8 rows: ZeroDivisionError" in done.stderr
    assert "scores: row float32 [8]" in done.stderr
    assert "\x1b" not in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_ctrl_c_stops_with_130_and_leaves_no_process(tmp_path):
    (tmp_path / "slow.py").write_text(
        "import time\ndef score(completion):\n    time.sleep(60)\n    return 1.0\n"
    )
    words = [sys.executable, "-m", "rlflow.cli.main", "run", "ppo", *NULL, "--reward", "slow.py:score"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # a script that starts the tests in the background ignores ctrl-C
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(words, cwd=tmp_path, start_new_session=True, preexec_fn=heard, **pipes) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("run: ")
        os.killpg(process.pid, signal.SIGINT)  # like a terminal: to the process group
        _out, err = process.communicate(timeout=240)
    assert process.returncode == 130, err
    assert err.startswith("stopped"), err  # and how to resume, if the run has begun
    assert "Traceback" not in err
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_quiet_prints_nothing_and_two_runs_have_two_folders(tmp_path, called):
    for number in (1, 2):
        assert called("run", "grpo", *NULL, "--quiet") == (0, "", "")
        assert (tmp_path / "runs" / f"grpo-{number}").is_dir()


def test_help_lists_every_setting_with_its_default_and_comment(called):
    code, out, _ = called("run", "ppo", "--help")
    assert code == 0
    for part in (
        "--hp.beta float >= 0 = 0.05 (packaged task: ",
        "--iterations int >= 1 = 100 (packaged task: 40)",
        "--hp.max_tokens int >= 1 = 1024 (packaged task: 8)",
        "--ROLE.lr float >= 0 and < inf = 1e-06 (packaged task: 0.0003)",
        "--config",
    ):
        assert part in out


def test_a_packaged_task_is_described_in_one_line():
    note = packaged_note("ppo", resolve_config(load_flow("ppo"), None, {})[0].values)
    assert note == (
        "task: packaged 'ppo' (data chain_sum, model arithmetic_model), because neither --model nor --data is "
        "given; `rlflow run ppo --help` lists its settings"
    )


def test_flags_override_settings_from_a_file(tmp_path, called):
    (tmp_path / "run.toml").write_text(
        'backend = "null"\niterations = 5\nprompts = 4\n[hp]\nmax_tokens = 4\nbeta = 0.5\n'
    )
    _, out, _ = called("run", "ppo", "--config", "run.toml", "--iterations", "2", "--json", "--quiet")
    last = json.loads(out)
    assert last["iterations"] == 2
    assert json.loads((tmp_path / last["run"] / "settings.json").read_text())["hp"]["beta"] == 0.5
