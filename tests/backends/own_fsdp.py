"""Checks of the fsdp trainer alone, by number of ranks. Every rank runs them in the process of
``contract.py``.
"""

import pytest
import torch
import torch.distributed as dist
import training_claims
from contract import NO_PLAN
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from training_claims import Subject
from transformers import AutoModelForCausalLM, Qwen2MoeConfig

from rlflow.backends.fsdp.ranks import Ranks, box, copies, own, whole
from rlflow.errors import PlanError


def frozen(ground):
    Subject(ground, "llama", trained=False).forward()
    Subject(ground, "reward", "scores", trained=False).forward()
    Subject(ground, "gemma2", trained=False, dtype="bfloat16").forward(atol=0.05)


def follows(ground):
    for settings in ({}, {"head": "values"}, {"head": "scores"}, {"dtype": "bfloat16"}, {"lora": 4}):
        training_claims.follows(ground, **settings)
    training_claims.follows(ground, tensor_parallel=2)


def experts(ground):
    """The file names experts differently from the model: the trainer loads them completely and then shards
    them.
    """
    folder = ground.folder / "experts"
    if ground.rank == 0:
        config = Qwen2MoeConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            moe_intermediate_size=24,
            num_hidden_layers=1,
            shared_expert_intermediate_size=24,
            num_experts=4,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    dist.barrier()
    Subject(ground, str(folder)).everything()


def low(ground):
    """bfloat16 rounds in other operations than under autocast: results agree within one percent."""
    for settings in ({}, {"lora": 4}):
        subject = Subject(ground, "qwen3", dtype="bfloat16", **settings)
        assert {p.dtype for p in subject.one.network.parameters().values()} == {torch.float32}
        subject.forward(atol=0.2)
        one, other = subject.learn(subject.one), subject.learn(subject.other)
        assert abs(one["loss"] - other["loss"]) <= 0.02 * abs(other["loss"])
        assert abs(one["grad_norm"] - other["grad_norm"]) <= 0.05 * other["grad_norm"]
        assert subject.distance() <= 5e-3


def split_heads(ground):
    Subject(ground, "qwen3", "values", tensor_parallel=2).everything()
    Subject(ground, "reward", "scores", tensor_parallel=2).everything()


def in_memory(trainer):
    """Return the bytes of this rank's storages, each counted once: its part of the model, and its moments."""
    moments = [
        tensor for state in trainer.optimizer.state.values() for tensor in state.values() if tensor.dim()
    ]
    return [
        sum({own(t).untyped_storage()._cdata: own(t).untyped_storage().nbytes() for t in tensors}.values())
        for tensors in ([*trainer.network.module.state_dict().values()], moments)
    ]


def sleep_frees_part_by_part(ground):
    """After a wake-up training continues as if nothing had happened."""
    subject = Subject(ground, "qwen3")
    subject.steps_alike()
    before = in_memory(subject.one)
    assert min(before) > 0
    subject.one.sleep("optimizer")
    assert in_memory(subject.one) == [before[0], 0]
    subject.one.sleep()
    assert in_memory(subject.one) == [0, 0]
    subject.one.wake()
    assert in_memory(subject.one) == before
    subject.steps_alike()
    assert subject.distance() <= 3e-5


def unsplit(ground):
    cases = [(shape, {}, "no plan in its config") for shape in NO_PLAN]
    for case, settings, words in [
        *cases,
        ("llama", {"lora": 4}, "adapters"),
        ("llama", {"shard": "none"}, "--shard full"),
    ]:
        with pytest.raises(PlanError, match=words):
            Subject(ground, case, tensor_parallel=2, **settings)


def both_ways(ground):
    """Shards of tensor-parallel parts: each of four ranks holds a quarter."""
    subject = Subject(ground, "qwen3", tensor_parallel=2, gradient_checkpointing=True)
    kept = sum(own(tensor).nbytes for _, tensor in subject.one.shards())
    assert kept <= 0.35 * sum(tensor.nbytes for _, tensor in subject.other.weights())
    subject.everything()


def uneven(ground):
    """Some shards are smaller or empty. They are read completely and written as sharded."""
    ranks = Ranks.of("cpu", 2)
    for wide in (2, 6, 10):
        torch.manual_seed(wide)
        layer = torch.nn.Linear(7, wide)
        wanted = {name: p.detach().clone() for name, p in layer.named_parameters()}
        parallelize_module(layer, ranks.tensor, ColwiseParallel())
        fully_shard(layer, mesh=ranks.data)
        for name, parameter in layer.named_parameters():
            assert torch.equal(whole(parameter.detach()), wanted[name]), (wide, name, parameter.placements)
            assert torch.equal(own(parameter.detach()), wanted[name][box(parameter)]), (
                wide,
                name,
                box(parameter),
            )
            assert copies(parameter) == 1


CHECKS = {
    2: {
        check.__name__: check
        for check in (frozen, follows, experts, low, split_heads, sleep_frees_part_by_part, unsplit)
    },
    4: {check.__name__: check for check in (uneven, both_ways)},
}
