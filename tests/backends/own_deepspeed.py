"""What is claimed of the deepspeed trainer alone: checks that both ranks make, in the process of
``contract.py``."""

import pytest
import torch
from training_claims import Subject, check_same, copied

from rlflow.backends.deepspeed.partitions import flats


def part(one):
    """The part of all weights' elements that this rank has in memory between calls."""
    parameters = list(one.network.module.parameters())
    held = sum(p.ds_tensor.numel() + p.data.numel() for p in parameters)
    return held / sum(p.ds_numel for p in parameters)


def nothing_stays_together(ground):
    """Of stage 3, before and after forwards and updates, of a frozen model too."""
    subject = Subject(ground, "gemma3", gradient_checkpointing=True)
    assert 0.5 <= part(subject.one) <= 0.6
    subject.forward()
    assert 0.5 <= part(subject.one) <= 0.6
    subject.learn(subject.one)
    assert 0.5 <= part(subject.one) <= 0.6
    frozen = Subject(ground, "qwen3", trained=False)
    frozen.forward()
    assert 0.5 <= part(frozen.one) <= 0.6


def frozen(ground):
    """It computes in the same bits, sleeps, and takes the state of another."""
    subject = Subject(ground, "qwen3", trained=False, packed=True)
    subject.forward(atol=0)
    subject.one.sleep()
    subject.one.wake()
    check_same(subject.one.state(), subject.other.state())
    other = Subject(ground, "gpt2", trained=False)
    other.one.restore(copied(other.other.state()))


def low(ground):
    """bfloat16 computes low and learns in float32. One row at a time, since rows beside it move a row's
    rounding."""
    subject = Subject(ground, "qwen3", dtype="bfloat16", micro_tokens=1)
    subject.learn(subject.one)
    subject.learn(subject.other)
    assert subject.apart() <= 3e-5, subject.apart()
    subject.forward(atol=0.02)
    assert all(tensor.dtype == torch.float32 for _, tensor in subject.one.weights())


def low_adapters(ground):
    """Of a bfloat16 base the merged weights are rounded."""
    subject = Subject(ground, "gpt2", dtype="bfloat16", lora=4, lr=5e-3, micro_tokens=1)
    subject.learn(subject.one)
    subject.learn(subject.other)
    assert subject.apart() <= 1e-3, subject.apart()
    assert list(subject.one.learning) == list(subject.other.network.parameters())
    fresh = subject.fresh()
    fresh.restore(copied(subject.other.state()))
    check_same(fresh.state(), subject.other.state())


def in_memory(trainer):
    """Bytes of this rank's storages, each once: of weights and their flat buffer, of the optimizer's copies
    and moments, of gradients."""
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


def sleep_frees_what_is_planned_for_it(ground):
    """Under each stage: weights and gradients in parts under 3, of the optimizer two moments and a float32
    copy."""
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
        for check in (nothing_stays_together, frozen, low, low_adapters, sleep_frees_what_is_planned_for_it)
    }
}
