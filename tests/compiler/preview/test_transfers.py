"""Planned weight transfers against layouts made by hand."""

from pathlib import Path

import pytest
from rich.filesize import decimal

import rlflow.data.tasks
from rlflow.cli.plan import weights
from rlflow.compiler.byte_sizes import ModelFacts
from rlflow.training.weight_sync.kinds import flat, tensor_parallel
from rlflow.training.weight_sync.planner import make_plan

FOLDER = Path(next(iter(rlflow.data.tasks.__path__))) / "arithmetic_model"
LINE = (
    f"grpo --model {FOLDER} --data chain_sum --actor.trainer fsdp --actor.generator vllm "
    "--actor.generator.tensor_parallel 2"
)
TWO = "--pools train=2,rollout=2"


@pytest.fixture(scope="module")
def facts():
    return ModelFacts.of(FOLDER)


@pytest.mark.parametrize(
    ("flags", "transport"),
    [
        ("", "segment"),
        ("--weights alltoall", "store"),
        ("--ray-address auto", "store"),
        ("--weights gather", "whole"),
        ("--actor.lora 4", "whole"),
        ("--staleness 1", "frozen"),
        ("--device cuda", "store"),
        ("--device cuda --weights segment", "segment"),
    ],
)
def test_each_rank_of_another_pool_receives_only_its_part(planned_as, facts, flags, transport):
    [moved] = planned_as(f"{LINE} {TWO} {flags}").weights
    whole = 4 * facts.parameters
    assert moved.transport == transport
    if transport == "whole":
        assert (moved.bytes, moved.each, moved.extra) == (2 * whole, None, None)
    else:
        assert whole / 2 <= moved.each < 0.51 * whole  # each rank has the full norms
        assert moved.bytes == 2 * moved.each
        assert 0 < moved.extra <= {"segment": 2, "store": 3, "frozen": 2}[transport] * 0.51 * whole


@pytest.mark.parametrize(
    ("flags", "transport", "says"),
    [
        ("", "segment", "by shared memory"),
        ("--device cuda", "handles", "by shared handles"),
        ("--device cuda --weights segment", "handles", "by shared handles"),
        ("--device cuda --weights alltoall", "alltoall", "by all-to-all"),
        ("--device cuda --ray-address auto", "alltoall", "by all-to-all"),
    ],
)
def test_shared_memory_on_one_pool_takes_two_buckets(planned_as, flags, transport, says):
    found = planned_as(f"{LINE} --pools all=2 {flags}")
    [moved] = found.weights
    assert (moved.transport, moved.extra) == (transport, (4 if transport == "alltoall" else 2) * moved.each)
    assert (
        f"  {says}; in addition to the model, a transfer takes at most {decimal(moved.extra)} on a rank"
        in weights(found)
    )


def test_a_trainer_with_full_weights_on_each_rank_moves_nothing(planned_as):
    [sizes] = planned_as(f"{LINE.replace('fsdp', 'local')} --pools all=4").weights
    assert sizes.bytes == 0


def test_zero_3_shards_flat_tensors_and_keeps_a_float_copy(planned_as, facts):
    found = planned_as(f"{LINE.replace('fsdp', 'deepspeed')} --pools all=4")
    target = tensor_parallel(facts.shapes, "float32", 2, 4)
    assert found.weights[0].each == make_plan(flat(facts.shapes, "float32", 4), target).stats.inbound.max()
    sizes = {entry.what: entry.bytes for entry in found.memory if entry.half == "trainer"}
    assert sizes["optimizer"] == 3 * sizes["gradient"] == 3 * facts.parameters  # 4 bytes, a quarter of them
