"""Runs in which a role follows another: its weights in three iterations, on pools, in checkpoints and eagerly."""

import dataclasses
import itertools
import json
import signal

import pytest
import torch
from run_faults import content, differences, in_child, resumed, signal_at
from sources import TESTS

import rlflow
from rlflow.author.load import load_flow
from rlflow.compiler.check.staleness import stale_problems
from rlflow.compiler.trace.compile import compile_flow

pytestmark = pytest.mark.slow

FLOW = load_flow(str(TESTS / "runs" / "flows" / "moving.py"))
SMALL = {"prompts": 4, "iterations": 3, "held_out": 0, "threads": 1, "prove": "off", "lr": 1e-2}
POOLS = {
    "one pool": {"pools": "all=1@threads"},
    "two pools": {
        "pools": "one=1@threads,two=1@threads",
        "actor.pool": "one",
        "anchor.pool": "two",
    },
    "full tensors": {
        "pools": "one=1@threads,two=1@threads",
        "actor.pool": "one",
        "anchor.pool": "two",
        "weights": "gather",
    },
}


@rlflow.loss(stale_ok="only traced")
def rewarded(new, scores):
    return -new.logprobs * scores[:, None], {}


def settings(**changes):
    return dataclasses.replace(FLOW.parameters.hp, **changes)


def weights(roles, role):
    """Return a copy of a role's weights, in the precision in which they are kept and with adapters merged."""
    state, start = roles.prepared.engine.models[role].trainer.state(), "parameters/"
    return {name.removeprefix(start): t.clone() for name, t in state.items() if name.startswith(start)}


def traced(hp, iterations=3, eager=False, **keywords):
    """Return the weights of actor and anchor before and after each iteration, and the anchor's versions."""
    roles = rlflow.roles(FLOW, hp, **SMALL | keywords)
    try:
        engine, seen, versions = roles.prepared.engine, [], []
        seen.append((weights(roles, "actor"), weights(roles, "anchor")))
        for _ in range(iterations):
            if eager:
                FLOW(roles.take(), **roles)
            else:
                outcome = roles.prepared.executor.run(roles.prepared.plan, roles.take())
                engine.keep(outcome.state, outcome.memory)
                engine.iteration += 1
            seen.append((weights(roles, "actor"), weights(roles, "anchor")))
            versions.append(engine.models["anchor"].version)
        return seen, versions
    finally:
        roles.close()


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def mixed(anchor, actor, mix):
    return {name: anchor[name] + (actor[name] - anchor[name]) * mix for name in anchor}


def test_a_moving_average_in_three_iterations():
    seen, versions = traced(settings(mix=0.25))
    for (_, before), (actor, after) in itertools.pairwise(seen):
        assert equal(after, mixed(before, actor, 0.25))
        assert not equal(after, before)
        assert not equal(after, actor)
    assert versions == [1, 2, 3]


def test_a_reset_in_every_second_iteration():
    seen, versions = traced(settings(mix=1.0, every=2, after=1))
    (_, start), (_, first), (actor, second), (_, third) = seen
    assert equal(first, start)
    assert equal(second, actor)
    assert equal(third, second)
    assert versions == [0, 1, 1]


def test_a_column_decides_instead_of_a_schedule():
    seen, versions = traced(settings(mix=1.0, when=True))
    assert versions == [0, 1, 1]
    assert equal(seen[2][0], seen[2][1])


def test_a_role_that_was_not_updated_is_not_followed():
    assert traced(settings(begin=2), backend="null")[1] == [0, 0, 1]


@pytest.mark.parametrize(
    "changes",
    [
        {"when": True},
        pytest.param({}, marks=pytest.mark.long),
        pytest.param({"mix": 1.0, "every": 2}, marks=pytest.mark.long),
        pytest.param({"answers": True}, marks=pytest.mark.long),
    ],
)
def test_eager_flows_follow_in_the_same_way(changes):
    planned, eager = traced(settings(**changes)), traced(settings(**changes), eager=True)
    assert planned[1] == eager[1]
    assert all(
        equal(one, other)
        for a, b in zip(planned[0], eager[0], strict=True)
        for one, other in zip(a, b, strict=True)
    )


def test_weights_that_follow_are_float32():
    seen, _ = traced(settings(mix=0.01), dtype="bfloat16", iterations=1)
    (_, before), (actor, after) = seen
    assert {tensor.dtype for tensor in after.values() if tensor.is_floating_point()} == {torch.float32}
    assert equal(after, mixed(before, actor, 0.01))
    assert not equal(after, {name: tensor.bfloat16().to(tensor) for name, tensor in after.items()})


def test_the_merged_weights_of_adapters_are_followed():
    seen, _ = traced(settings(mix=0.5), **{"actor.lora": 4})
    for (_, before), (actor, after) in itertools.pairwise(seen):
        assert equal(after, mixed(before, actor, 0.5))
    assert not equal(seen[0][1], seen[-1][1])


def run(tmp_path, name, hp=None, **keywords):
    keywords = {**SMALL, "save_every": 1, "out": str(tmp_path), "name": name, **keywords}
    assert in_child(lambda: rlflow.run(FLOW, hp, quiet=True, **keywords)) == 0
    return tmp_path / name


@pytest.mark.parametrize("where", POOLS)
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="plain"),
        pytest.param({"answers": True}, id="samples", marks=pytest.mark.long),
        pytest.param({"actor.lora": 4}, id="lora", marks=pytest.mark.long),
    ],
)
def test_one_rank_of_each_pool_is_bit_equal_to_one_process(tmp_path, where, changes):
    hp = settings(answers=changes.get("answers", False))
    flags = {name: value for name, value in changes.items() if "." in name}
    straight = content(run(tmp_path, "straight", hp, **flags))
    there = content(run(tmp_path, "there", hp, **flags, **POOLS[where]))
    assert straight.tensors.keys() == there.tensors.keys() >= {"actor.parameters", "anchor.parameters"}
    for group, tensors in straight.tensors.items():
        assert equal(tensors, there.tensors[group]), group


@pytest.mark.parametrize(
    "pools", ["all=2@threads", "one=2@threads,two=2@threads", "one=2@threads,two=1@threads"]
)
def test_several_ranks_follow(pools):
    places = {"actor.pool": "one", "anchor.pool": "two"} if "two" in pools else {}
    seen, versions = traced(settings(mix=0.25), iterations=2, pools=pools, **places)
    for (_, before), (actor, after) in itertools.pairwise(seen):
        assert equal(after, mixed(before, actor, 0.25))
        assert not equal(after, before)
    assert versions == [1, 2]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="here", marks=pytest.mark.long),
        pytest.param(POOLS["two pools"], id="pools"),
    ],
)
def test_a_resumed_run_ends_on_the_same_weights(tmp_path, options):
    straight = run(tmp_path, "straight", **options, iterations=4)
    cut = run(tmp_path, "cut", **options, iterations=2)
    assert resumed(cut, iterations=4) == 0
    one, other = content(cut), content(straight)
    assert one.tensors.keys() == other.tensors.keys() >= {"anchor.parameters"}
    assert all(equal(tensors, other.tensors[group]) for group, tensors in one.tensors.items())
    assert one.state == other.state


@pytest.mark.long
def test_a_run_that_is_killed_while_a_role_follows_resumes_to_the_same_bits(tmp_path):
    straight = run(tmp_path, "straight", iterations=4)

    def cut():
        signal_at("anchor.follow", 3, signal.SIGKILL)
        keywords = SMALL | {"iterations": 4, "save_every": 1, "out": str(tmp_path), "name": "cut"}
        rlflow.run(FLOW, quiet=True, **keywords)

    assert in_child(cut) == -signal.SIGKILL
    assert resumed(tmp_path / "cut") == 0
    assert list(differences(content(tmp_path / "cut"), content(straight))) == []


def test_an_evaluation_answers_with_the_weights_that_moved(tmp_path):
    hp = settings(mix=1.0, every=2)  # moves after iteration 0, and not after iteration 1
    folder = run(tmp_path, "evaluated", hp, iterations=2, held_out=32, eval_every=1, lr=0.1)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    before, moved, same = [line["evaluation/sampled"] for line in lines if "evaluation/sampled" in line]
    assert before != moved == same


def test_rows_of_a_role_that_follows_have_its_own_versions():
    """The role moves after iterations 0 and 2."""
    roles = rlflow.roles(FLOW, settings(answers=True, every=2), **SMALL)
    try:
        batches = [FLOW(roles.take(), **roles) for _ in range(4)]
        versions = [batch["policy_version"][batch["mask"]] for batch in batches]
        assert [of.unique().tolist() for of in versions] == [[0], [1], [1], [2]]
    finally:
        roles.close()


def test_a_role_that_follows_samples_ahead_of_training(tmp_path):
    run(tmp_path, "ahead", settings(answers=True), pools="train=1@threads,rollout=1@threads", staleness=1)


def test_the_null_backend_follows_too(tmp_path):
    straight = run(tmp_path, "straight", backend="null", iterations=4)
    cut = run(tmp_path, "cut", backend="null", iterations=2)
    assert resumed(cut, iterations=4) == 0
    assert list(differences(content(cut), content(straight))) == []
    # an iteration is a single step: 1 / 4, then 0.25 + (2 - 0.25) / 4 and so on
    assert content(straight).tensors["anchor.parameters"]["steps"].item() == 1.94921875


def test_iterations_ahead_do_not_read_a_role_that_moves():
    """The scores of the moving role decide what is sampled next."""

    @rlflow.stage(gives={"low": rlflow.row("float32")})
    def lowest(ref_logprobs):
        return -ref_logprobs.sum(1)

    @rlflow.flow(keeps=lambda hp: {"anchor": rlflow.follow("actor")})
    def ahead(prompts, actor, anchor, reward):
        first = actor.generate(prompts, samples=2, max_tokens=4)
        first |= anchor.logprobs(first, gives="ref_logprobs")
        first = rlflow.choose(first | lowest(first), top="low", count=1, per="group")
        batch = actor.generate(rlflow.ask(first, "completion"), samples=2, max_tokens=4)
        batch |= reward(batch)
        actor.update(batch, rewarded)

    problems = list(stale_problems(compile_flow(ahead), staleness=1))
    assert ("staleness-chain", "anchor.logprobs") in [(p.code, p.message.split("'")[3]) for p in problems]
