"""A generator next to its trainer samples with the trainer's own tensors and their current values."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from sources import TASKS
from test_packing import rows

from rlflow import loss
from rlflow.author.batch import Batch
from rlflow.author.load import load_flow
from rlflow.backends.local import Generator, Trainer
from rlflow.backends.local.settings import TrainerSettings
from rlflow.compiler.trace.compile import compile_flow
from rlflow.config.flags import sort_values
from rlflow.config.roles.bound import bind_roles, shares_weights
from rlflow.config.roles.loaded_models import make_models
from rlflow.training.protocols import ModelSpec, Sampling

PROMPTS = Batch.of(prompt_tokens=[[5, 6, 7], [8, 9]])


@loss
def likely(new, mask):
    """Return the log-probs as values of the loss."""
    return -new.logprobs


def places(weights):
    return {name: tensor.data_ptr() for name, tensor in weights}


def sampled(generator):
    drawn = generator.generate(PROMPTS, Sampling(samples=4, max_tokens=8), list(range(8)))
    return drawn["tokens"].tolist(), drawn["sampled_logprobs"]


# with its own head, and with the embeddings as the head
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_generator_with_shared_weights_samples_like_one_with_a_copy(folders, family):
    spec = ModelSpec(Path(folders[family]), trained=True)
    trainer, shares, copies = Trainer(spec, TrainerSettings(lr=1e-2)), Generator(spec), Generator(spec)
    before = sampled(copies)
    shares.share(trainer.weights())
    assert places(shares.network.tensors()) == places(trainer.weights())
    for version in (1, 2):
        trainer.update(rows(0), likely)
        for generator in (shares, copies):
            generator.receive(trainer.weights(), version)
        now = sampled(shares)
        assert now[0] == sampled(copies)[0]
        assert torch.equal(now[1], sampled(copies)[1])
        assert not torch.equal(now[1], before[1])
    assert places(shares.network.tensors()) == places(trainer.weights())
    assert not any(parameter.requires_grad for parameter in shares.network.module.parameters())


def bound(**flags):
    graph = compile_flow(load_flow("grpo")).graph
    model = TASKS / "arithmetic_model"
    config = sort_values({"model": str(model), **flags}, [use.name for use in graph.roles])
    return bind_roles(graph, config)["actor"], config.options


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, True),
        ({"dtype": "bfloat16"}, False),
        ({"staleness": 1}, False),
        ({"memory": "20GiB"}, False),
        ({"pools": "all=2"}, False),
        ({"actor.lora": 4}, False),
        ({"actor.trainer": "fsdp"}, False),
        ({"actor.generator": "null"}, False),
        ({"actor.generator": "trees.heirs"}, False),
    ],
)
def test_weights_are_shared_on_request_on_one_pool(flags, expected, monkeypatch):
    heirs = ModuleType("heirs")
    heirs.Generator = type("Generator", (Generator,), {})  # may receive weights in its own way
    monkeypatch.setitem(sys.modules, "trees.heirs", heirs)
    role, options = bound(**flags)
    assert shares_weights(role, options) is expected


def test_the_models_of_a_run_share_weights():
    role, options = bound()
    model = make_models([role], options, "cpu", {})["actor"]
    assert places(model.generator.network.tensors()) == places(model.trainer.weights())
