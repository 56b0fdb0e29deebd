"""Checks of the deepspeed trainer alone. Both ranks run them in the process of ``contract.py``."""

import pytest
import torch
import training_claims
from training_claims import Subject, check_same, copied

from rlflow.backends.deepspeed.partitions import flats


def part(one):
    """Return the fraction of all weights that this rank holds in memory between calls."""
    parameters = list(one.network.module.parameters())
    elements = sum(p.ds_tensor.numel() + p.data.numel() for p in parameters)
    return elements / sum(p.ds_numel for p in parameters)


def ranks_keep_only_their_part(ground):
    """Stage 3, before and after forwards and updates, also for a frozen model."""
    subject = Subject(ground, "gemma3", gradient_checkpointing=True)
    assert 0.5 <= part(subject.one) <= 0.6
    subject.forward()
    assert 0.5 <= part(subject.one) <= 0.6
    subject.learn(subject.one)
    assert 0.5 <= part(subject.one) <= 0.6
    frozen = Subject(ground, "qwen3", trained=False)
    frozen.forward()
    assert 0.5 <= part(frozen.one) <= 0.6


def follows(ground):
    for settings in ({}, {"head": "values"}, {"dtype": "bfloat16"}, {"lora": 4}, {"zero": 1}):
        training_claims.follows(ground, **settings)


def frozen(ground):
    """A frozen model computes the same bits, sleeps, and loads the state of another trainer."""
    subject = Subject(ground, "qwen3", trained=False, packed=True)
    subject.forward(atol=0)
    subject.one.sleep()
    subject.one.wake()
    check_same(subject.one.state(), subject.other.state())
    other = Subject(ground, "gpt2", trained=False)
    other.one.restore(copied(other.other.state()))


def low(ground):
    """bfloat16 forwards and float32 steps. One row at a time, because other rows change a row's rounding."""
    subject = Subject(ground, "qwen3", dtype="bfloat16", micro_tokens=1)
    subject.learn(subject.one)
    subject.learn(subject.other)
    assert subject.distance() <= 3e-5, subject.distance()
    subject.forward(atol=0.02)
    assert all(tensor.dtype == torch.float32 for _, tensor in subject.one.weights())


def low_adapters(ground):
    """The merged weights of a bfloat16 base are rounded."""
    subject = Subject(ground, "gpt2", dtype="bfloat16", lora=4, lr=5e-3, micro_tokens=1)
    subject.learn(subject.one)
    subject.learn(subject.other)
    assert subject.distance() <= 1e-3, subject.distance()
    assert list(subject.one.learning) == list(subject.other.network.parameters())
    fresh = subject.fresh()
    fresh.restore(copied(subject.other.state()))
    check_same(fresh.state(), subject.other.state())


def in_memory(trainer):
    """Return the bytes of this rank's storages, each counted once: weights and their flat buffer, the
    optimizer's copies and moments, gradients.
    """
    optimizer = trainer.engine.optimizer
    weights = [getattr(p, "ds_tensor", p) for p in trainer.network.module.parameters()]
    moments = [
        tensor for state in optimizer.optimizer.state.values() for tensor in state.values() if tensor.dim()
    ]
    gradients = (
        [optimizer.grad_partitions_flat_buffer] if hasattr(optimizer, "grad_partitions_flat_buffer") else []
    )
    parts = weights, [*flats(optimizer), *moments], gradients
    return [
        sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())
        for tensors in parts
    ]


def sleep_frees_the_planned_bytes(ground):
    """Under each stage. Stage 3 divides weights and gradients; the optimizer has two moments and a float32
    copy.
    """
    for zero in (1, 2, 3):
        subject = Subject(ground, "llama", zero=zero)
        subject.learn(subject.one)
        whole = sum(p.numel() * 4 for p in subject.other.network.parameters().values())
        before = in_memory(subject.one)
        subject.one.sleep("optimizer")
        subject.one.sleep()
        assert in_memory(subject.one) == [0, 0, 0]
        subject.one.wake()
        assert in_memory(subject.one) == before
        expected = [whole / (2 if zero == 3 else 1), 3 * whole / 2, whole / 2 if zero == 3 else 0]
        assert before == pytest.approx(expected, rel=0.05)


CHECKS = {
    2: {
        check.__name__: check
        for check in (
            ranks_keep_only_their_part,
            frozen,
            follows,
            low,
            low_adapters,
            sleep_frees_the_planned_bytes,
        )
    }
}
