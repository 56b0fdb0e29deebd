"""Faults from real issue threads are named: by `check` before anything is loaded, or by a falsified claim."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from planted import BACKENDS, FILES
from sources import ROOT

from rlflow.errors import FlowError

ALGORITHMS = ROOT / "algorithms"


def falsified(claims):
    return [claim.name for claim in claims if claim.verdict == "falsified"]


@pytest.mark.parametrize("fault", FILES)
def test_a_fault_in_a_file_is_named(tmp_path, proven, fault):
    name, old, new, expected = FILES[fault]
    source = (ALGORITHMS / f"{name}.py").read_text()
    assert old in source
    path = tmp_path / f"{name}.py"
    path.write_text(source.replace(old, new))
    settings = {} if name in ("dpo", "sft") else {"hp.max_tokens": 6}
    try:
        named = falsified(proven(str(path), flow_only=True, **settings))
    except FlowError as error:
        named = [problem.code for problem in error.problems]
    assert expected in named


@pytest.mark.slow
@pytest.mark.parametrize("fault", BACKENDS)
def test_a_fault_in_a_backend_is_named(proven, fault):
    name, settings, half, kind, expected = BACKENDS[fault]
    assert expected in falsified(proven(name, half, kind, **{"hp.max_tokens": 6, **settings}))


@pytest.mark.slow
def test_a_run_without_faults_falsifies_nothing_and_is_restored(proven):
    claims = proven("ppo", **{"hp.max_tokens": 6})
    assert falsified(claims) == []
    assert {"reward-reaches", "reward-direction", "sampler-follows", "micro-batches", "frozen"} <= {
        claim.name for claim in claims
    }


@pytest.mark.slow
def test_a_role_that_follows_as_declared_is_no_fault(proven):
    claims = proven("prorl", **{"hp.max_tokens": 6, "hp.samples": 4})
    assert falsified(claims) == []
    assert {"follows", "frozen"} <= {claim.name for claim in claims}


@pytest.mark.slow
@pytest.mark.parametrize("bar", [5, -5])
def test_a_threshold_far_from_the_synthetic_scores_is_accepted(tmp_path, proven, bar):
    source = (
        (ALGORITHMS / "grpo.py")
        .read_text()
        .replace("compare(batch, deviation=hp.deviation)", "passed(batch)")
    )
    kept = f"(scores - {bar}).clamp({'min' if bar > 0 else 'max'}=0)"
    stage = f'@stage(gives="advantages")\ndef passed(scores, mask):\n    return {kept}[:, None] * mask\n\n\n'
    path = tmp_path / "barred.py"
    path.write_text(f"from rlflow import stage\n{source.replace('@flow', f'{stage}@flow')}")
    claims = {claim.name: claim for claim in proven(str(path), **{"hp.max_tokens": 6})}
    assert falsified(claims.values()) == []
    assert f"from 0 to {20 * bar}" in claims["reward-reaches"].number
    assert {claims[name].verdict for name in ("reward-direction", "weights-direction", "weights-scores")} == {
        "proved"
    }


@pytest.mark.slow
def test_a_loss_may_ignore_scores(tmp_path, proven):
    source = (
        (ALGORITHMS / "grpo.py")
        .read_text()
        .replace("* clipped_gain(ratio, advantages, clip, clip)", "* ratio")
    )
    path = tmp_path / "watched.py"
    path.write_text(source.replace("@loss\n", '@loss(unrewarded="the reward is only watched")\n'))
    claims = {claim.name: claim for claim in proven(str(path), **{"hp.max_tokens": 6})}
    assert claims["reward-reaches"].verdict == "unproved"
    assert "the reward is only watched" in claims["reward-reaches"].sentence
    assert claims["weights-move"].verdict == "proved"
    assert "weights-scores" not in claims


@pytest.mark.long
def test_ranks_that_do_not_share_gradients_are_named():
    command = [
        sys.executable,
        "-m",
        "rlflow.cli.main",
        "prove",
        "ppo",
        "--pools",
        "all=2@threads",
        "--actor.trainer",
        "planted_ranks.alone",
        "--critic.trainer",
        "planted_ranks.uneven",
        "--threads",
        "1",
        "--held_out",
        "0",
        "--hp.max_tokens",
        "6",
        "--hp.samples",
        "4",
    ]
    ended = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)}, capture_output=True, text=True
    )
    assert ended.returncode == 2, ended.stderr
    wrong = [line for line in ended.stdout.splitlines() if line.startswith("falsified")]
    for role, others in (("actor", ["split into micro-batches"]), ("critic", [])):
        own = [line for line in wrong if f"{role}.update: " in line]
        told = [*others, "order of rows, or on their rank", "than one process with all rows"]
        assert len(own) == len(told)
        assert all(words in line for words, line in zip(told, own, strict=True))
    assert len(wrong) == 5
