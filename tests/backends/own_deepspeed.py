"""What is claimed of the deepspeed trainer alone: checks that both ranks make, in the process of ``contract.py``."""

import torch
from training_claims import Subject, check_same, copied


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
    subject = Subject(ground, "qwen3", trained=False)
    subject.forward(atol=0)
    subject.one.sleep()
    subject.one.wake()
    check_same(subject.one.state(), subject.other.state())
    other = Subject(ground, "gpt2", trained=False)
    other.one.restore(copied(other.other.state()))


def low(ground):
    """bfloat16 computes low and learns in float32. One row at a time, since rows beside it move a row's rounding."""
    subject = Subject(ground, "qwen3", dtype="bfloat16", micro_tokens=1)
    subject.learn(subject.one)
    subject.learn(subject.other)
    assert subject.apart() <= 1e-5, subject.apart()
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


CHECKS = {2: {check.__name__: check for check in (nothing_stays_together, frozen, low, low_adapters)}}
