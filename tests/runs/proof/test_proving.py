"""A run with a proof equals the run without one."""

import json
import random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sources import ROOT

import rlflow
from rlflow.checkpoints.reading import load_latest
from rlflow.errors import PlanError, StageError
from rlflow.monitoring.explained import explanation
from rlflow.runs.proof.claims import Claim
from rlflow.runs.proof.proving import refusal

ALGORITHMS = ROOT / "algorithms"


@pytest.mark.slow
def test_a_proof_does_not_change_a_run(task):
    small = {"prompts": 4, "held_out": 0, "threads": 1, "hp.samples": 4, "hp.max_tokens": 4, "save_every": 0}
    runs, chance = {}, {}
    # the first run of a process imports modules that later runs have, and importing draws from Python's RNG
    for prove in ("off", "quick", "off"):
        torch.manual_seed(11)
        random.seed(11)
        np.random.seed(11)
        runs[prove] = rlflow.run("ppo", **{**task, **small, "prove": prove}).folder
        chance[prove] = (
            torch.random.get_rng_state().tolist(),
            random.getstate(),
            np.random.get_state()[1].tolist(),
        )
    assert chance["quick"] == chance["off"]
    assert "reward-direction" not in (text := (runs["quick"] / "proof.txt").read_text())
    assert "become more likely" in text
    assert "falsified" not in text
    assert not (runs["off"] / "proof.txt").exists()
    one, other = (
        {
            str(path.relative_to(folder)): load_file(path)
            for path in sorted((folder / "checkpoints").rglob("*.safetensors"))
        }
        for folder in runs.values()
    )
    assert one.keys() == other.keys()
    assert len(one) > 1
    assert all(
        torch.equal(tensor, other[file][name])
        for file, tensors in one.items()
        for name, tensor in tensors.items()
    )
    manifests = [
        json.loads(next(folder.glob("checkpoints/*/manifest.json")).read_text())["manifest"]
        for folder in runs.values()
    ]
    # digests of all files, and the state: cursor, seed, versions, and the flow's state
    assert manifests[0] == manifests[1]
    assert manifests[0]["state"]["prompts"]["cursor"] == 8
    assert (runs["quick"] / "samples.jsonl").read_bytes() == (runs["off"] / "samples.jsonl").read_bytes()
    metrics = [
        [
            {
                name: value
                for name, value in json.loads(line).items()
                if "seconds" not in name and "per_second" not in name
            }
            for line in (folder / "metrics.jsonl").read_text().splitlines()
        ]
        for folder in runs.values()
    ]
    assert metrics[0] == metrics[1]


def test_a_falsified_or_strictly_unproved_run_does_not_begin():
    turned, other = (
        Claim("reward-direction", "actor.update", "falsified", "…", ends_run=ends) for ends in (True, False)
    )
    assert [bool(refusal([turned], prove)) for prove in ("auto", "quick", "strict", "warn")] == [
        True,
        True,
        True,
        False,
    ]
    assert [bool(refusal([other], prove)) for prove in ("auto", "quick", "strict", "warn")] == [
        False,
        False,
        True,
        False,
    ]
    assert (
        refusal([Claim("reward-direction", "actor.update", "proved", "…", ends_run=True)], "strict") is None
    )


COUNTED = """
import torch
from rlflow import compare, flow, loss, stage

@loss
def gain(new, logprobs, advantages):
    return -(new.logprobs - logprobs).exp() * advantages

@stage(gives="doubled")
def counted(scores, *, file):
    with open(file, "a") as opened:
        print(torch.get_num_threads(), file=opened)
    return scores * 2

@flow
def counts(prompts, actor, reward):
    batch = actor.generate(prompts, samples=4, max_tokens=8)
    batch |= reward(batch)
    batch |= actor.logprobs(batch)
    batch |= counted(batch, file=FILE)
    batch |= compare(batch)
    actor.update(batch, gain)
"""


@pytest.fixture
def threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_stages_use_one_thread_in_the_proof_as_in_the_run(tmp_path, threads_as_before):
    """A thread that computes with several threads keeps them as long as it lives, which slows all others
    down."""
    path, counts = tmp_path / "counts.py", tmp_path / "counts.txt"
    path.write_text(f"FILE = {str(counts)!r}\n{COUNTED}")
    rlflow.run(
        str(path),
        backend="null",
        prompts=4,
        iterations=2,
        threads=2,
        prove="quick",
        out=str(tmp_path),
        name="counts",
    )
    alone = counts.read_text().split()
    assert len(alone) > 2
    assert set(alone) == {"1"}


IMPURE = """
from rlflow import ALL, RANK0, choose, compare, flow, loss, repeat, row, stage

SEEN = []

@stage(gives={"fresh": row(bool)}, dispatch=RANK0, pure=False)
def unseen(prompt_id):
    SEEN.append(len(prompt_id))
    return (prompt_id + len(SEEN)) % 3 > 0

@stage(gives="advantages", pure=False)
def spread(scores, mask):
    SEEN.append(0)
    return mask * (scores + len(SEEN))[:, None], {"calls": float(len(SEEN))}

@stage(on="reference", dispatch=ALL, pure=False)
def count(reference, scores):
    reference.count += len(SEEN)
    return {"steps": float(reference.steps)}

@loss
def gain(new, advantages, ref_logprobs):
    return -new.logprobs * advantages * ref_logprobs.exp()

def unseen_prompts(prompts):
    return choose(prompts | unseen(prompts), "fresh")

@flow
def impure(prompts, actor, reference, reward):
    if CURRICULUM:
        prompts = repeat(unseen_prompts, prompts, groups=4, tries=3)
    batch = actor.generate(prompts, samples=2, max_tokens=8)
    batch |= reward(batch)
    batch |= reference.logprobs(batch, gives="ref_logprobs")
    batch |= spread(batch)
    count(batch)
    actor.update(batch, gain)
"""


@pytest.mark.parametrize(("curriculum", "stage"), [(True, "unseen"), (False, "spread")])
def test_a_proof_does_not_change_a_run_with_side_effects(tmp_path, curriculum, stage):
    outcomes = []
    for prove in ("off", "quick"):
        path = tmp_path / f"{prove}.py"  # a file is loaded once, so its list persists
        path.write_text(f"CURRICULUM = {curriculum}\n{IMPURE}")
        folder = rlflow.run(
            str(path), backend="null", prompts=6, iterations=2, prove=prove, out=str(tmp_path), name=prove
        ).folder
        saved = load_latest(folder).snapshot
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        metrics = [{name: value for name, value in line.items() if "second" not in name} for line in lines]
        outcomes.append(
            (metrics, saved.tensors, {name: value for name, value in saved.state.items() if name != "graph"})
        )
    assert outcomes[0] == outcomes[1]
    assert saved.tensors["reference.parameters"]["steps"] == outcomes[0][0][-1]["count/steps"] > 0
    assert f"unproved   impure: stage '{stage}' has side effects (" in (folder / "proof.txt").read_text()


@pytest.mark.slow
def test_a_wrong_sign_ends_a_run_before_its_first_iteration(task, tmp_path, capsys):
    path = tmp_path / "turned.py"
    path.write_text((ALGORITHMS / "grpo.py").read_text().replace("charge - weights", "charge + weights"))
    small = {
        **task,
        "prompts": 4,
        "held_out": 0,
        "threads": 1,
        "hp.samples": 4,
        "hp.max_tokens": 4,
        "iterations": 1,
        "save_every": 0,
    }
    for prove in ("strict", "quick"):
        with pytest.raises(PlanError, match="become less likely(.|\n)*--prove warn") as refused:
            rlflow.run(str(path), **{**small, "prove": prove, "name": prove})
        assert [problem.code for problem in refused.value.problems] == ["reward-direction"]
        assert "falsified" in (tmp_path / "runs" / prove / "proof.txt").read_text()
        assert not (tmp_path / "runs" / prove / "metrics.jsonl").exists()
    capsys.readouterr()
    done = rlflow.run(str(path), **{**small, "prove": "warn"})
    assert "warning: falsified" in capsys.readouterr().err
    assert len((done.folder / "metrics.jsonl").read_text().splitlines()) == 1
    first = next(line for line in explanation(done.folder) if line.startswith("alarm: "))
    assert "become less likely (correlation -" in first
    assert f"{path.name}:" in first.partition("correct ")[2]


PICKY = """
from rlflow import flow, loss, stage

def judge(completion):
    return float("1" in completion)

@stage(gives="advantages")
def compare(scores, mask):
    if ((scores != 0) & (scores != 1)).any():
        raise ValueError("scores are 0 or 1")
    return (scores - scores.mean())[:, None] * mask

@loss
def policy_loss(new, advantages):
    return -new.logprobs * advantages, {}

@flow
def picky(prompts, actor, reward):
    batch = actor.generate(prompts, samples=4, max_tokens=3)
    batch |= reward(batch)
    batch |= compare(batch)
    actor.update(batch, policy_loss)
"""


BROKEN = """
from rlflow import flow, loss, stage

@stage(gives="own")
def known_on_the_first_batch(scores):
    return scores

@stage(gives="advantages")
def broken(own, mask):
    return own[:, None] * mask * missing

@loss
def policy_loss(new, advantages):
    return -new.logprobs * advantages, {}

@flow
def breaking(prompts, actor, reward):
    batch = actor.generate(prompts, samples=4, max_tokens=3)
    batch |= reward(batch)
    batch |= known_on_the_first_batch(batch)
    batch |= broken(batch)
    actor.update(batch, policy_loss)
"""


def test_a_stage_that_raises_in_the_dry_run_ends_the_run(tmp_path):
    # `check` cannot call the stage, because it does not know the kind of its column
    (tmp_path / "breaking.py").write_text(BROKEN)
    with pytest.raises(
        StageError, match="NameError: name 'missing' is not defined(.|\n)*in the dry run before iteration 1"
    ) as raised:
        rlflow.run(
            str(tmp_path / "breaking.py"),
            backend="null",
            prompts=4,
            iterations=1,
            prove="quick",
            out=str(tmp_path),
            name="run",
        )
    assert raised.value.stage == "broken"
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_limits_of_the_dry_run_do_not_stop_a_run(task, tmp_path):
    small = {
        **task,
        "prompts": 4,
        "held_out": 0,
        "threads": 1,
        "iterations": 1,
        "save_every": 0,
        "prove": "quick",
    }
    (tmp_path / "lengths.json").write_text(json.dumps({"lengths": [12, 1, 9]}))
    forced = rlflow.run(
        "grpo",
        **{
            **small,
            "hp.samples": 2,
            "hp.max_tokens": 12,
            "actor.generate.lengths": str(tmp_path / "lengths.json"),
        },
    )
    assert "become more likely" in (forced.folder / "proof.txt").read_text()
    (tmp_path / "picky.py").write_text(PICKY)
    picky = rlflow.run(str(tmp_path / "picky.py"), **{**small, "reward": f"{tmp_path}/picky.py:judge"})
    assert (
        "unproved   picky: a stage rejects scores between 0 and 1: "
        in (picky.folder / "proof.txt").read_text()
    )
    assert len((picky.folder / "metrics.jsonl").read_text().splitlines()) == 1
