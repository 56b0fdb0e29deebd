"""A local trainer on another device than its rows, in place of a GPU: it computes there and keeps its tensors
there.
"""

import pytest
import torch
from waits import DEVICE, counted

from rlflow import loss
from rlflow.author.batch import Batch
from rlflow.backends.local import Trainer
from rlflow.training.protocols import ModelSpec

ROWS = Batch.of(
    prompt_tokens=[[5, 6, 7], [9], [3, 3, 3, 3, 3]],
    tokens=[[5, 6], [7, 8, 9], [1]],
    mask=[[True, True], [True, False, True], [True]],
    logprobs=[[-1.0, -2.0], [-1.0, -1.0, -1.0], [-2.0]],
    advantages=[[1.0, 2.0], [1.0, 1.0, 1.0], [2.0]],
    temperature=[1.0, 0.5, 1.0],
)


@loss(new=("logprobs", "entropy"))
def policy(new, logprobs, advantages):
    ratio = (new.logprobs - logprobs).exp()
    return -ratio * advantages - new.entropy, {"ratio": ratio, "ratio_max": ratio.max(), "row": ratio.sum(1)}


@loss(new="values")
def critic(new, advantages):
    return (new.values - advantages) ** 2, {}


@loss(new="scores")
def scorer(new, temperature):
    return (new.scores - temperature) ** 2, {}


CASES = [
    ("logprobs", policy, "tokens", {}),
    ("logprobs", policy, "tokens", {"lora": 4}),
    ("values", critic, "tokens", {}),
    ("logprobs", policy, "tokens", {"gradient_checkpointing": True, "micro_tokens": 8, "logit_tokens": 2}),
    ("scores", scorer, "rows", {}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("head", "objective", "mean", "settings"), CASES)
def test_a_trainer_computes_and_learns_on_the_device_of_its_weights(folders, head, objective, mean, settings):
    trainer = Trainer(ModelSpec(folders["llama"], head, trained=True), Trainer.Settings(**settings))
    saved = {name: tensor.clone() for name, tensor in trainer.state().items()}
    trainer.network.to(DEVICE)
    trainer.network.identity = id  # tensors without storage have no address to distinguish them
    # a fused optimizer needs a real device
    trainer.optimizer = torch.optim.AdamW(list(trainer.network.parameters().values()))
    with counted() as waits:
        for forward in (trainer.forward, trainer.forward_ahead):
            assert forward(ROWS).data[head].value.device.type == "cpu"
        trainer.update(ROWS, objective, mean=mean)
        assert {
            tensor.device
            for state in trainer.optimizer.state.values()
            for tensor in state.values()
            if tensor.dim()
        } == {DEVICE}
        assert saved.keys() < trainer.state().keys()
        trainer.restore(saved)
    assert {parameter.device for parameter in trainer.network.parameters().values()} == {DEVICE}
    assert set(waits) <= {"to meta", "to cpu", "_local_scalar_dense", "index", "index_put_", "copy_"}


def test_rows_are_padded_on_their_own_device():
    from rlflow.author.batch import pad

    flat, lengths = torch.arange(4.0).to(DEVICE), torch.tensor([3, 1])
    assert pad(flat, lengths).device == DEVICE
