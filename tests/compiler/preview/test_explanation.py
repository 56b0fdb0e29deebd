"""Planned nodes, columns and weights against numbers computed by hand."""

import json

import pytest
from sources import ROOT, TASKS

ALGORITHMS = sorted(path.stem for path in (ROOT / "algorithms").glob("[a-z]*.py"))
PPO = (
    "ppo --pools train=4,rollout=2 --prompts 8 --hp.samples 2 --hp.max_tokens 16 --data.max_prompt 10 "
    "--hp.epochs 2"
)


@pytest.fixture(scope="module")
def ppo(planned_as):
    return planned_as(PPO)


def by_name(found):
    return {step.name: step for step in found.steps}


def edge(found, source, target, column):
    [one] = [e for e in found.edges if (e.source, e.target) == (source, target) and column in e.columns]
    return one


def test_waves_are_the_longest_chains_of_nodes(ppo):
    assert {name: step.wave for name, step in by_name(ppo).items()} == {
        "actor.generate": 0,
        "reward": 1,
        "actor.logprobs": 1,
        "reference.logprobs": 1,
        "critic.values": 1,
        "truncated_weights": 2,
        "charge_kl": 2,
        "gae": 3,
        "normalise": 4,
        "critic.update": 4,
        "actor.update": 5,
    }


def test_each_node_runs_in_its_pool_with_a_layout(ppo):
    shown = {
        name: (step.pool, step.dispatch, step.layout, step.split_of) for name, step in by_name(ppo).items()
    }
    assert shown["actor.generate"] == ("rollout", "DP_COMPUTE", "by prompts", "prompts")
    assert shown["reward"] == ("rollout", "DP_COMPUTE", "by prompts", "prompts")
    assert shown["critic.values"] == ("train", "DP_COMPUTE", "by rows", None)
    assert shown["gae"] == ("train", "DP_COMPUTE", "by rows", "actor.logprobs")
    assert shown["normalise"] == ("train", "RANK0", "rank 0", None)
    assert shown["actor.update"] == ("train", "UPDATE", "by minibatch", None)


@pytest.mark.parametrize(
    ("source", "target", "column", "size", "moved"),
    [
        ("prompts", "actor.generate", "prompt_tokens", 8 * 10 * 8, 0),  # 8 prompts of 10 int64
        # repeated for 16 rows, to the other pool, as int32
        ("prompts", "actor.logprobs", "prompt_tokens", 16 * 10 * 8, 16 * 10 * 4),
        ("prompts", "reference.logprobs", "prompt_tokens", 16 * 10 * 8, 0),  # which keeps them from then on
        # with one temperature per row
        ("actor.generate", "actor.logprobs", "tokens", 16 * (16 * 8 + 4), 16 * (16 * 4 + 4)),
        ("actor.generate", "charge_kl", "mask", 16 * 16, 16 * 16),
        ("actor.generate", "gae", "mask", 16 * 16, 0),
        ("actor.logprobs", "charge_kl", "logprobs", 16 * 16 * 4, 0),  # stays on its own rank
        (
            "gae",
            "normalise",
            "advantages",
            16 * 16 * 4,
            16 * 16 * 4 * 3 // 4,
        ),  # all except rank 0's quarter
        # ranks redrawn in two epochs
        ("gae", "critic.update", "returns", 16 * 16 * 4, int(16 * 16 * 4 * 3 * (1 - (3 / 4) ** 2))),
    ],
)
def test_an_edge_states_its_bytes(ppo, source, target, column, size, moved):
    found = edge(ppo, source, target, column)
    assert (found.bytes, found.moved) == (size, moved)
    assert found.why == ("stays" if not moved else "pool" if found.from_pool != found.to_pool else "split")


def test_with_one_rank_nothing_moves_within_a_pool(planned_as):
    assert {e.why for e in planned_as(PPO.replace("train=4,rollout=2", "all=1")).edges} == {"stays"}


def test_the_plan_lists_concurrent_and_exclusive_nodes(ppo):
    shown = {(pair.first, pair.second): pair.lane for pair in ppo.pairs}
    assert shown["reward", "actor.logprobs"] is None
    assert shown["actor.logprobs", "critic.values"] == "train"
    assert ("actor.generate", "reward") not in shown


def test_concurrent_nodes_overlap_in_virtual_time(ppo):
    assert ppo.time.together("reward", "actor.logprobs")
    assert not ppo.time.together("actor.logprobs", "critic.values")
    assert ppo.time.bound <= ppo.time.makespan


def test_the_plan_shows_the_body_of_a_repeat(planned_as):
    found = planned_as(
        "dapo --pools train=2,rollout=2 --prompts 8 --hp.groups 4 --hp.samples 2 --hp.max_tokens 8"
    )
    inside = [step.name for step in found.steps if step.within]
    assert inside == ["actor.generate", "reward", "mixed"]
    assert {step.within for step in found.steps if step.within} == {"repeat.sampled"}
    kept = 4 * 2  # counts kept rows, not sampled rows
    assert edge(found, "repeat.sampled", "actor.logprobs", "tokens").bytes == kept * (300 * 8 + 8 * 8 + 4)
    assert edge(found, "actor.generate", "mixed", "group").bytes == 8 * 2 * 8
    # kept rows stay on the rank that sampled them
    assert edge(found, "repeat.sampled", "compare", "group").from_pool == "rollout"


def test_a_plan_in_one_process_has_bytes_and_no_moves(planned_as):
    found = planned_as(PPO.replace("--pools train=4,rollout=2", ""))
    assert found.moved == 0
    assert {step.pool for step in found.steps} == {None}
    assert found.weights == ()
    assert edge(found, "actor.generate", "actor.logprobs", "tokens").bytes == 16 * (16 * 8 + 4)


def test_pairs_are_two_rows_on_the_same_rank(planned_as):
    found = planned_as("dpo --pools all=2 --prompts 4")
    assert found.rows == 8
    assert by_name(found)["reference.logprobs"].layout == "by groups"
    assert by_name(found)["reference.logprobs"].split_of == "pairs"


@pytest.mark.parametrize(
    ("algorithm", "pools"),
    [
        *((algorithm, "--pools train=2,rollout=3") for algorithm in ALGORITHMS),
        *((algorithm, pools) for algorithm in ("dapo", "dpo", "ppo") for pools in ("", "--pools all=3")),
    ],
)
def test_every_algorithm_has_a_plan(planned_as, algorithm, pools):
    found = planned_as(f"{algorithm} {pools}")
    shown = json.loads(json.dumps(found.as_json()))
    placed = {step["name"]: step for step in shown["nodes"]}
    ranks = shown["pools"] or {None: 1}
    assert shown["edges"]
    for node in shown["nodes"]:
        if node["op"] == "repeat":
            assert (node["pool"], node["layout"]) == (None, "")
        else:
            assert node["pool"] in ranks
            assert bool(node["layout"]) == bool(pools)
    for edge in shown["edges"]:
        assert 0 <= edge["moved"] <= edge["bytes"] * (max(ranks.values()) + 1)
        assert (edge["why"] == "stays") == (edge["moved"] == 0)
        assert edge["to_pool"] == placed[edge["target"]]["pool"]
        # for a repeat, the edges of its body state the pool
        whole = placed[edge["target"]]["op"] == "repeat"
        assert (edge["from_pool"] is None) if whole else (edge["from_pool"] in ranks)
    assert shown["time"]["bound"] <= shown["time"]["makespan"] * (1 + 1e-12)
    assert set(shown["time"]["critical"]) <= set(placed)


def test_the_plan_names_the_transfer_to_a_role_that_follows(planned_as):
    model = TASKS / "arithmetic_model"
    places = "--actor.pool one --reference.pool two"
    found = planned_as(f"tr_dpo --model {model} --pools one=2,two=1 {places} --dtype bfloat16 --prompts 4")
    (edge,) = found.weights
    assert (edge.role, edge.after, edge.before) == ("actor", "actor.update", ("reference.follow",))
    assert (edge.from_pool, edge.to_pool) == ("one", "two")
    (arriving,) = [item for item in found.memory if item.what == "arriving weights"]
    assert (arriving.role, arriving.pool) == ("reference", "two")
    assert edge.bytes == arriving.bytes  # float32, to the one rank
    assert list(planned_as(f"tr_dpo --model {model} --pools all=2 --prompts 4").weights) == []
