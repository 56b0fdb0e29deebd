"""A forward pass from which an update continues: bit-identical numbers, and never a graph of other rows or
other weights.
"""

import pytest
import torch

from rlflow import loss
from rlflow.author.batch import Batch
from rlflow.backends.local import Trainer
from rlflow.backends.local.heap import HEAP
from rlflow.training.protocols import ModelSpec


def rows(seed=0, count=6):
    chance = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 7, (count,), generator=chance).tolist()
    return Batch.of(
        prompt_tokens=[[5, 6, 7][: 1 + i % 3] for i in range(count)],
        tokens=[torch.randint(3, 60, (n,), generator=chance) for n in lengths],
        mask=[[True] * n for n in lengths],
        temperature=[0.5 + 0.1 * i for i in range(count)],
    )


def learner(folders, head="logprobs", **settings):
    return Trainer(
        ModelSpec(folders["qwen3"], head=head, trained=True), Trainer.Settings(lr=1e-2, **settings)
    )


@loss
def surrogate(new, logprobs):
    return -(new.logprobs - logprobs).exp(), {}


@loss(new="values")
def regression(new, values):
    return (new.values - values - 1).square(), {}


def learned(folders, ahead, between=lambda trainer: None, count=2, epochs=1, head="logprobs", **settings):
    """Return parameters and metrics after some iterations, and the number of passes through the model."""
    trainer, passes = learner(folders, head, **settings), []
    trainer.network.backbone.register_forward_hook(lambda *_: passes.append(1))
    for seed in range(count):
        batch = rows(seed)
        batch |= (trainer.forward_ahead if ahead else trainer.forward)(batch)
        between(trainer)
        metrics = trainer.update(batch, surrogate if head == "logprobs" else regression, epochs=epochs)
    return torch.cat([p.flatten() for p in trainer.network.parameters().values()]), metrics, len(passes)


@pytest.mark.parametrize("head", ["logprobs", "values"])
@pytest.mark.parametrize("epochs", [1, 3])
def test_a_reused_pass_gives_the_same_update(folders, epochs, head):
    again, metrics, passes = learned(folders, False, epochs=epochs, head=head)
    ahead, metrics_ahead, passes_ahead = learned(folders, True, epochs=epochs, head=head)
    assert torch.equal(again, ahead)
    assert metrics == metrics_ahead
    assert passes - passes_ahead == 2  # one for each iteration


@pytest.mark.parametrize(
    ("micro_tokens", "ahead", "order"),
    [
        (16384, True, {"given back", "pass"}),
        (16384, False, {"pass"}),
        (16, True, {"pass"}),
    ],
)
def test_memory_is_freed_only_before_a_pass_that_keeps_its_graph(
    folders, monkeypatch, micro_tokens, ahead, order
):
    trainer, seen = learner(folders, micro_tokens=micro_tokens), []
    monkeypatch.setattr(HEAP, "_release", lambda: seen.append("given back"))
    trainer.network.backbone.register_forward_hook(lambda *_: seen.append("pass"))
    (trainer.forward_ahead if ahead else trainer.forward)(rows())
    assert set(seen) == order
    assert seen[0] == ("given back" if "given back" in order else "pass")


def test_rows_of_several_micro_batches_are_computed_again(folders):
    again, _, passes = learned(folders, False, micro_tokens=16)
    ahead, _, passes_ahead = learned(folders, True, micro_tokens=16)
    assert torch.equal(again, ahead)
    assert passes == passes_ahead


def test_a_pass_with_other_weights_is_not_reused(folders, tmp_path):
    learner(folders).save(tmp_path)

    def loaded(trainer):
        trainer.load(tmp_path)

    again, _, _ = learned(folders, False, between=loaded)
    ahead, _, _ = learned(folders, True, between=loaded)
    assert torch.equal(again, ahead)


@pytest.mark.parametrize("change", ["tokens", "temperature", "prompt_tokens", "fewer"])
def test_a_pass_over_other_rows_is_not_reused(folders, change):
    results = []
    for ahead in (False, True):
        trainer, batch = learner(folders), rows()
        batch |= (trainer.forward_ahead if ahead else trainer.forward)(batch)
        if change == "fewer":
            batch = batch.rows([0, 1, 3, 4, 5])
        else:
            batch.data[change].value.add_(1)
        trainer.update(batch, surrogate)
        results.append(torch.cat([p.flatten() for p in trainer.network.parameters().values()]))
    assert torch.equal(*results)
