"""The gradient of large embeddings that are also the head: unchanged, and in one tensor of their size."""

import pytest
import torch
from test_packing import rows
from test_shared_weights import likely
from transformers import Qwen3Config, Qwen3ForCausalLM

from rlflow.backends.local import Trainer
from rlflow.backends.local.embeddings import add_by_rows
from rlflow.backends.local.network import load_network
from rlflow.backends.local.sampling import LARGE
from rlflow.backends.local.settings import TrainerSettings
from rlflow.training.protocols import ModelSpec

pytestmark = pytest.mark.slow  # runs models or processes: each test is short, but all together are not

CONFIG = {
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def folder(path, vocabulary=LARGE, tied=True):
    torch.manual_seed(0)
    Qwen3ForCausalLM(
        Qwen3Config(vocab_size=vocabulary, tie_word_embeddings=tied, **CONFIG)
    ).double().save_pretrained(path)
    return path


def trainer_of(path, dtype="float64", **settings):
    # two micro-batches
    return Trainer(
        ModelSpec(path, trained=True, dtype=dtype), TrainerSettings(lr=1e-2, micro_tokens=30, **settings)
    )


def embeddings_of(trainer):
    return trainer.network.module.get_input_embeddings()


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    return folder(tmp_path_factory.mktemp("large"))


def plain(trainer):
    """Undo the change to the embeddings of a trainer."""
    embeddings = embeddings_of(trainer)
    embeddings.sparse = False
    embeddings._forward_pre_hooks.clear()
    embeddings._forward_hooks.clear()


def trained(trainer):
    for seed in (0, 1):
        batch = rows(seed)
        trainer.update(batch | trainer.forward_ahead(batch), likely, epochs=2)
    return embeddings_of(trainer).weight.detach().clone()


@pytest.mark.parametrize(
    ("dtype", "settings", "near"),
    [
        ("float64", {}, 1e-9),
        ("float64", {"gradient_checkpointing": True}, 1e-9),
        ("float64", {"packed": False}, 1e-9),
        ("bfloat16", {}, 1e-6),
    ],
)
def test_the_gradient_equals_the_one_of_plain_embeddings(large, dtype, settings, near):
    one, other = trainer_of(large, dtype, **settings), trainer_of(large, dtype, **settings)
    assert embeddings_of(one).sparse
    plain(other)
    before = embeddings_of(one).weight.detach().clone()
    torch.testing.assert_close(trained(one), trained(other), atol=near, rtol=near)
    assert not torch.equal(embeddings_of(one).weight, before)


def test_frozen_or_replaced_weights_are_left_unchanged(large):
    frozen, replaced = trainer_of(large), trainer_of(large)
    embeddings_of(frozen).weight.requires_grad_(False)
    frozen.network.hidden(torch.tensor([[5]]), torch.arange(1)[None], use_cache=False)
    assert embeddings_of(frozen).weight.grad is None
    other = embeddings_of(replaced).weight = torch.nn.Parameter(
        torch.ones_like(embeddings_of(replaced).weight)
    )
    replaced.network.hidden(
        torch.tensor([[5]]), torch.arange(1)[None], use_cache=False
    ).square().sum().backward()
    assert embeddings_of(replaced).weight is other
    assert other.grad.any(1).nonzero()[:, 0].tolist() == [5]


def test_rows_are_added_to_the_gradient_of_the_head_in_place(large):
    trainer, places = trainer_of(large), []
    weight = embeddings_of(trainer).weight
    weight.register_post_accumulate_grad_hook(
        lambda weight: places.append((weight.grad.data_ptr(), weight.grad.clone()))
    )
    trainer.backward(trainer.compute(rows(0), ("logprobs",)).logprobs.sum())
    ((place, of_head),) = places
    assert weight.grad.data_ptr() == place
    read = torch.unique(rows(0)["prompt_tokens"])
    changed = (weight.grad != of_head).any(1).nonzero()[:, 0]
    assert len(changed)
    assert set(changed.tolist()) <= {*read.tolist(), *rows(0)["tokens"].flatten().tolist()}


def test_embeddings_have_a_gradient_without_their_head(large):
    trainer = trainer_of(large)
    hidden = trainer.network.hidden(torch.tensor([[5, 6]]), torch.arange(2)[None], use_cache=False)
    hidden.square().sum().backward()
    gradient = embeddings_of(trainer).weight.grad
    assert gradient.layout == torch.strided
    assert gradient.any(1).nonzero()[:, 0].tolist() == [5, 6]


def test_the_module_has_its_own_parameter_after_each_pass(large):
    trainer = trainer_of(large)
    own = embeddings_of(trainer).weight
    for ids in (torch.tensor([[5]]), torch.tensor([[LARGE]])):
        with pytest.raises(IndexError) if ids[0, 0] == LARGE else torch.enable_grad():
            trainer.network.hidden(ids, torch.arange(1)[None], use_cache=False)
        assert embeddings_of(trainer).weight is own
        assert isinstance(own, torch.nn.Parameter)


def test_small_untied_and_frozen_embeddings_are_left_unchanged(large, tmp_path):
    small, apart = folder(tmp_path / "small", 64), folder(tmp_path / "apart", tied=False)
    for spec in (
        ModelSpec(small, trained=True),
        ModelSpec(apart, trained=True),
        ModelSpec(large),
        ModelSpec(large, "values", True),
    ):
        network = load_network(spec)
        add_by_rows(network)
        assert not network.module.get_input_embeddings().sparse
        assert not network.module.get_input_embeddings()._forward_pre_hooks


def test_frozen_embeddings_next_to_adapters_are_left_unchanged(large):
    trainer = trainer_of(large, "bfloat16", lora=2)
    assert not embeddings_of(trainer).sparse
    trained(trainer)
    assert embeddings_of(trainer).weight.grad is None
