"""Memory estimates against loaded models."""

from pathlib import Path

import pytest
import torch

import rlflow.data.tasks
from rlflow.author.load import load_flow
from rlflow.backends.local import Trainer
from rlflow.backends.local.settings import TrainerSettings
from rlflow.compiler.byte_sizes import ModelFacts, ModelFootprint
from rlflow.compiler.graph.model import Op
from rlflow.compiler.preview.sizes import Assumed, Sizes
from rlflow.compiler.trace.compile import compile_flow
from rlflow.training.protocols import ModelSpec

FOLDER = Path(next(iter(rlflow.data.tasks.__path__))) / "arithmetic_model"


@pytest.fixture(scope="module")
def facts():
    return ModelFacts.of(FOLDER)


def size(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize(
    ("head", "dtype", "lora", "targets"),
    [
        ("logprobs", "float32", 0, "all-linear"),
        ("logprobs", "bfloat16", 0, "all-linear"),
        ("values", "float64", 0, "all-linear"),
        ("scores", "float32", 0, "all-linear"),
        ("values", "float32", 4, "all-linear"),
        ("logprobs", "float32", 4, "all-linear"),
        ("logprobs", "bfloat16", 4, "attention"),
    ],
)
def test_the_memory_of_a_trainer_is_estimated(facts, head, dtype, lora, targets):
    trainer = Trainer(
        ModelSpec(FOLDER, head, True, "cpu", dtype), TrainerSettings(lora=lora, lora_targets=targets)
    )
    estimated = ModelFootprint(facts, head, True, dtype, lora, targets == "attention").trainer()
    learning = trainer.network.parameters().values()
    assert estimated["weights"] == size(tensor for _, tensor in trainer.network.own())
    assert estimated["gradient"] == size(learning)
    assert estimated["optimizer"] == 2 * size(learning)
    assert ModelFootprint(facts, head, True, dtype, lora, targets == "attention", copied=True).trainer()[
        "optimizer"
    ] == 3 * size(learning)
    assert estimated.get("adapters") == (size(learning) if lora else None)


@pytest.mark.parametrize(
    ("head", "dtype", "lora"),
    [
        ("logprobs", "float32", 0),
        ("logprobs", "bfloat16", 0),
        ("values", "float64", 0),
        ("scores", "float32", 0),
        ("values", "float32", 4),
        ("logprobs", "bfloat16", 4),
    ],
)
def test_an_in_memory_checkpoint_has_the_estimated_bytes(facts, head, dtype, lora):
    trainer = Trainer(ModelSpec(FOLDER, head, True, "cpu", dtype), TrainerSettings(lora=lora))
    for parameter in trainer.network.parameters().values():
        parameter.grad = torch.zeros_like(parameter)
    trainer.step()
    state = {name: tensor for name, tensor in trainer.state().items() if name not in ("steps", "base/sha256")}
    assert ModelFootprint(facts, head, True, dtype, lora).commit_bytes == size(state.values())


def test_a_plan_lists_the_copies_kept_for_recovery(planned_as, facts):
    line = f"ppo --model {FOLDER} --data chain_sum --pools train=1,rollout=1"
    found = planned_as(line).commits
    assert found.every == 1
    assert found.bytes.keys() == {"actor", "critic"}  # recovery reads the reference from its folder
    assert found.bytes["actor"] == 3 * 4 * facts.parameters
    assert planned_as(f"{line} --commit-every 10").commits.every == 10
    assert planned_as(f"{line} --commit-every 0").commits is None
    alone = line.partition(" --pools")[0]
    assert planned_as(alone).commits is None
    assert planned_as(f"{alone} --commit-every 2").commits.bytes == found.bytes


def test_the_cache_of_a_token_is_estimated(facts):
    trainer = Trainer(ModelSpec(FOLDER, "logprobs", False, "cpu", "float32"))
    with torch.no_grad():
        cache = trainer.network.module(
            input_ids=torch.ones(1, 7, dtype=torch.int64), use_cache=True
        ).past_key_values
    measured = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert facts.cache_numbers == measured // 7
    assert (
        ModelFootprint(facts, batch_tokens=100).generator()["cache, at most"]
        == int(measured // 7 * 100 * 1.5) * 4
    )


def test_sizes_missing_from_a_folder_are_unknown(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    kept = ModelFootprint(ModelFacts.of(tmp_path), trained=True)
    assert kept.trainer() == {"weights": None, "gradient": None, "optimizer": None}
    assert kept.generator() == {"weights": None, "cache, at most": None}


def test_trainer_and_generator_are_placed_on_their_pools(planned_as):
    found = planned_as(f"ppo --model {FOLDER} --data chain_sum --pools train=2,rollout=3 --actor.lora 4")
    measured = {(entry.pool, entry.role, entry.half, entry.what): entry.bytes for entry in found.memory}
    assert {key[:3] for key in measured} == {
        ("train", "actor", "trainer"),
        ("train", "critic", "trainer"),
        ("train", "reference", "trainer"),
        ("rollout", "actor", "generator"),
    }
    assert ("train", "reference", "trainer", "gradient") not in measured
    assert (
        measured["train", "actor", "trainer", "gradient"] < measured["train", "critic", "trainer", "gradient"]
    )
    [moved] = found.weights
    assert (moved.after, moved.before) == ("actor.update", ("actor.generate",))
    assert moved.bytes == 3 * measured["train", "actor", "trainer", "weights"]  # each rank gets all


def test_a_part_divided_over_ranks_counts_its_share_on_each(planned_as):
    line = f"grpo --model {FOLDER} --data chain_sum --pools all=4"
    whole = {
        (entry.half, entry.what): entry.bytes for entry in planned_as(line).memory if entry.role == "actor"
    }
    engines = (
        "--actor.trainer fsdp --actor.generator vllm --actor.generator.tensor_parallel 2 "
        "--actor.kv_cache_memory_bytes 4096"
    )
    parts = {
        (entry.half, entry.what): entry.bytes
        for entry in planned_as(f"{line} {engines}").memory
        if entry.role == "actor"
    }
    for what in ("weights", "gradient", "optimizer"):
        assert parts["trainer", what] == -(-whole["trainer", what] // 4)
    assert parts["generator", "weights"] == -(-whole["generator", "weights"] // 2)
    assert parts["generator", "cache"] == 4096


def test_resharding_for_sampling_moves_the_fewest_bytes(planned_as, facts):
    line = f"grpo --model {FOLDER} --data chain_sum --pools all=4 --actor.trainer fsdp --actor.generator vllm"
    [replicas] = planned_as(line).weights
    whole = 4 * facts.parameters
    assert (replicas.from_pool, replicas.to_pool) == ("all", "all")
    assert replicas.each == pytest.approx(whole * 3 / 4, rel=0.02)  # each rank has a quarter
    [parts] = planned_as(f"{line} --actor.generator.tensor_parallel 2").weights
    assert parts.each < replicas.each
    # each rank trains all weights
    assert planned_as(f"grpo --model {FOLDER} --data chain_sum --pools all=4").weights == ()


@pytest.mark.parametrize(
    ("pools", "where"),
    [("--pools train=1,rollout=1", "rollout"), ("--pools all=2", "all"), ("", "this process")],
)
def test_a_reward_model_is_placed_on_its_scoring_pool(planned_as, pools, where):
    found = planned_as(f"grpo --model {FOLDER} --data chain_sum --reward {FOLDER} {pools}")
    assert [entry.pool for entry in found.memory if entry.half == "reward"] == [where]
    assert [step.pool for step in found.steps if step.name == "reward"] == [where if pools else None]


def test_a_flow_without_sampling_has_a_generator_for_evaluation(planned_as):
    found = planned_as(f"sft --model {FOLDER} --data chain_sum --pools train=1,rollout=1")
    assert ("rollout", "generator") in {(entry.pool, entry.half) for entry in found.memory}
    assert found.weights[0].before == ()
    [warning, unused] = planned_as(
        f"sft --model {FOLDER} --data chain_sum --pools a=1,b=1 --actor.trainer.pool a"
    ).warnings
    assert (warning.code, unused.code) == ("evaluation-undecided", "pool-unused")
    assert warning.remedy == "--actor.generator.pool a, or --held-out 0"


@pytest.mark.parametrize(
    ("flow", "rows", "groups"),
    [
        ("sft", [6], [6]),
        ("dpo", [12], [6]),  # each record of a pair data set has two rows
        ("ppo", [6, 6], [6, 6]),
        ("grpo", [6, 48], [6, 6]),
    ],
)
def test_an_axis_has_the_expected_rows_and_groups(flow, rows, groups):
    sizes = Sizes.of(compile_flow(load_flow(flow)).graph, Assumed(prompts=6))
    assert [sizes.rows[axis] for axis in sorted(sizes.rows)] == rows
    assert [sizes.groups[axis] for axis in sorted(sizes.groups)] == groups


def test_a_repeat_has_its_groups_whatever_one_try_gives():
    graph = compile_flow(load_flow("dapo")).graph
    [node] = [node for node in graph.nodes if node.body]
    sizes, settings = Sizes.of(graph, Assumed(prompts=6)), node.settings
    samples = graph.axes[node.makes].samples
    assert sizes.rows[node.makes] == settings.groups * samples
    assert sizes.groups[node.makes] == settings.groups
    body = sizes.bodies[node.id]
    assert body.rows[body.graph.rows] == 6 * samples


def test_column_bytes_follow_the_rows_of_the_owner_or_the_reader():
    graph = compile_flow(load_flow("grpo")).graph
    sizes = Sizes.of(graph, Assumed(prompts=5, prompt_tokens=16))
    samples = next(node for node in graph.nodes if node.op is Op.GENERATE).settings.samples
    update = next(node for node in graph.nodes if node.op is Op.UPDATE)
    prompts = next(item for item in update.inputs if item.column.name == "prompt_tokens")
    assert sizes.given(prompts.column) == 5 * 16 * 8
    assert sizes.read(update, prompts) == samples * 5 * 16 * 8
