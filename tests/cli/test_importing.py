"""`rlflow import` writes a file, or reports the unsupported settings and writes none."""

import json
import os
import tomllib
from pathlib import Path

import pytest

from rlflow.cli.main import exit_code

VERL, OPENRLHF = (
    "python3 -m verl.trainer.main_ppo",
    "python3 -m openrlhf.cli.train_ppo_ray --data.prompt_dataset d.jsonl",
)
GROWS = "A0=xxxx\n" + "".join(f"A{n + 1}=$A{n}$A{n}$A{n}$A{n}\n" for n in range(20))
ALIASES = "a0: &a0 [x]\n" + "".join(f"a{n + 1}: &a{n + 1} [{','.join([f'*a{n}'] * 8)}]\n" for n in range(9))
MERGES = "a0: &a0 {x: 1}\n" + "".join(
    f"a{n + 1}: &a{n + 1} {{<<: [{','.join([f'*a{n}'] * 8)}]}}\n" for n in range(9)
)
DAMAGED = [  # (file, its text, the refusal)
    ("run.sh", f"{GROWS}{VERL} data.train_files=$A20", "expand to more than 1048576 characters"),
    ("run.sh", f"{VERL} {'x' * 70000}", "is too long"),
    ("run.sh", f"{VERL} algorithm.adv_estimator=grpo \\\n", "ends within the command"),
    ("run.sh", f"{VERL} data.val_files=\"['a", "a quote that is not closed"),
    ("run.sh", f"{VERL} algorithm.adv_est", "a word of the trainer's command is not a setting"),
    ("run.sh", f"{VERL} data.seed=1\n{VERL} data.seed=2", "starts 2 trainers"),
    ("run.sh", f"{VERL} data.seed=1 data.seed=2", "gives data.seed twice"),
    ("run.sh", f"{VERL} data.seed={'9' * 5000}", "a valid integer"),
    ("run.sh", f"{VERL} data.seed={'9' * 30}", "less than 9223372036854775808"),
    ("run.sh", f"{VERL} actor_rollout_ref.actor.optim.lr=nan", "a finite number"),
    (
        "run.sh",
        f"{VERL} actor_rollout_ref.rollout.n=abc",
        "actor_rollout_ref.rollout.n = 'abc' cannot be read",
    ),
    ("run.sh", f"{VERL} algorithm.adv_estimator=[grpo]", "algorithm.adv_estimator = ['grpo'] cannot be read"),
    (
        "run.sh",
        f"{VERL} algorithm.adv_estimator=$ESTIMATOR",
        "algorithm.adv_estimator = '$ESTIMATOR' cannot be read",
    ),
    ("run.sh", "\0" * 1000, "does not start verl's trainer"),
    ("run.yaml", ALIASES, "with aliases expanded"),
    ("run.yaml", MERGES, "with aliases expanded"),
    ("run.yaml", "a: &a {b: *a}", "with aliases expanded"),
    ("run.yaml", f"a: &a {'x' * 1000}\nb: [{','.join(['*a'] * 9000)}]", "expanded"),
    ("run.yaml", "- " * 5000, "more than 32 levels"),
    ("run.yaml", "[" * 5000, "is not a YAML file of settings"),
    ("run.yaml", "[1, 2]", "found:    a list"),
    ("run.yaml", "a: !!python/object/apply:os.getcwd []", "is not a YAML file of settings"),
    ("run.yaml", "data:\n  seed: 1\n  seed: 2", "line 3: the key 'seed' is given twice"),
    ("run.yaml", f"data: {{seed: 0x{'f' * 5000}}}", "a number of 5002 digits"),
    ("run.yaml", "a:\n\tb: 1", "is not a YAML file of settings"),
    (
        "run.yaml",
        "algorithm: {adv_estimator: '${oc.env:HOME}'}",
        "algorithm.adv_estimator = '${oc.env:HOME}' cannot be read",
    ),
    (
        "run.yaml",
        "actor_rollout_ref: {actor: {optim: {lr: .nan}}}",
        "actor_rollout_ref.actor.optim.lr = nan cannot be read",
    ),
    ("open.sh", f"{OPENRLHF} --actor.adam.betas 0.9", "actor.adam.betas = 0.9 cannot be read"),
    ("open.sh", f"{OPENRLHF} --actor.model_name_or_path $(x y)", "a value that is given in the file itself"),
    ("open.sh", f"{OPENRLHF} --rollout.batch_size", "rollout.batch_size = True cannot be read"),
    ("open.sh", f"{OPENRLHF} --lambd 0.5 --algo.advantage.lambd 1", "gives algo.advantage.lambd twice"),
    (
        "open.sh",
        f"{OPENRLHF} --prompt_max_len abc --generate_max_len 3",
        "data.max_len = 'abc' cannot be read",
    ),
    ("open.sh", OPENRLHF.replace("--data", "data"), "a word of the trainer's command is not a flag"),
]


def test_settings_without_a_counterpart_are_reported_and_become_comments(tmp_path, capsys):
    script = tmp_path / "run.sh"
    script.write_text("python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.entropy_coeff=0.001\n")
    assert exit_code(["import", "verl", str(script), "-o", str(tmp_path / "run.toml")]) == 0
    assert "actor_rollout_ref.actor.entropy_coeff" in "".join(capsys.readouterr())
    lines = (tmp_path / "run.toml").read_text().splitlines()
    assert [line[0] for line in lines if "entropy_coeff" in line] == ["#"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["verrl", "run.sh"], "nearest:  verl"),
        (["verl", "nowhere.sh"], "cannot be read"),
        (["verl", "empty.sh"], "does not start verl's trainer"),
        (["openrlhf", "empty.sh"], "does not start OpenRLHF's trainer"),
    ],
)
def test_an_impossible_import_is_reported(words, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.sh").write_text("echo nothing\n")
    (tmp_path / "run.sh").write_text("python3 -m verl.trainer.main_ppo\n")
    assert exit_code(["import", *words]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "run.toml").exists()


@pytest.mark.parametrize(("file", "text", "says"), DAMAGED, ids=lambda text: text[-30:])
def test_a_damaged_or_incomplete_file_is_refused_by_name(file, text, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path(file).write_text(text)
    assert exit_code(["import", "openrlhf" if file == "open.sh" else "verl", file]) == 2
    assert says in capsys.readouterr().err
    assert not Path("run.toml").exists()


def test_only_a_regular_file_of_bounded_size_is_read(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.sh")
    os.symlink("/dev/zero", "zero.sh")
    Path("large.sh").write_bytes(b"#" * ((1 << 20) + 1))
    Path("binary.sh").write_bytes(bytes(range(256)))
    for name, says in (
        ("pipe", "not a regular file"),
        ("zero", "not a regular file"),
        ("large", "a longer file"),
        ("binary", "start byte"),
    ):
        assert exit_code(["import", "verl", f"{name}.sh"]) == 2
        assert says in capsys.readouterr().err


def test_the_input_file_is_never_overwritten(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("run.sh").write_text(VERL)
    Path("link.sh").symlink_to("run.sh")
    for out in ("run.sh", "../" + tmp_path.name + "/run.sh", "link.sh", ".", "/dev/null"):
        assert exit_code(["import", "verl", "run.sh", "-o", out]) == 2
        assert f"--out {out} cannot be written" in capsys.readouterr().err
    assert Path("run.sh").read_text() == VERL


@pytest.mark.parametrize("text", ['a"b\\c', "a\x7fb", "a\tb\x1bc", "a#b=[c]", "ü 'x' y"])
def test_every_written_file_can_be_read(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tree = {"algorithm": {"adv_estimator": "grpo"}, "data": {"prompt_key": text, "train_files": [text]}}
    Path("run.yaml").write_text(json.dumps(tree))
    assert exit_code(["import", "verl", "run.yaml", "-o", "a\nb = 1.toml"]) == 0
    written = tomllib.loads(Path("a\nb = 1.toml").read_text())["data"]
    assert (written["prompt"], written["source"]) == (text, [text])
