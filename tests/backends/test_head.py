"""A head with a large vocabulary computes few rows with its weights transposed, and gives the same logits."""

from types import SimpleNamespace

import pytest
import torch
from sources import TASKS
from test_embeddings import CONFIG, folder

from rlflow.author.batch import Batch
from rlflow.backends.local import Generator
from rlflow.backends.local.head import FEW, read_few_rows
from rlflow.backends.local.network import load_network
from rlflow.backends.local.sampling import LARGE
from rlflow.training import pretrained
from rlflow.training.protocols import ModelSpec, Sampling

MODEL = TASKS / "arithmetic_model"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    def make(name, vocabulary):
        path = folder(tmp_path_factory.mktemp(name), vocabulary)
        pretrained.read_tokenizer(MODEL).save_pretrained(path)
        return path

    return SimpleNamespace(large=make("large", LARGE), small=make("small", LARGE - 1))


def is_turned(spec):
    network = load_network(spec)
    read_few_rows(network)
    return network.read is not network.module.get_output_embeddings()


def test_only_a_large_float32_vocabulary_is_transposed(folders):
    assert is_turned(ModelSpec(folders.large))
    assert not is_turned(ModelSpec(folders.large, dtype="bfloat16"))
    assert not is_turned(ModelSpec(folders.large, dtype="float64"))
    assert not is_turned(ModelSpec(folders.small))


def test_heads_stay_plain_without_mkl(folders, monkeypatch):
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    assert not is_turned(ModelSpec(folders.large))


@pytest.mark.parametrize("rows", [0, 1, 2, FEW, FEW + 1])
def test_logits_of_few_and_many_rows_match_the_head(folders, rows):
    network = load_network(ModelSpec(folders.large))
    read_few_rows(network)
    hidden = torch.randn(rows, CONFIG["hidden_size"])
    logits = network.read(hidden)
    assert logits.is_contiguous()
    torch.testing.assert_close(logits, network.module.get_output_embeddings()(hidden), atol=1e-5, rtol=1e-5)


def test_many_rows_use_the_plain_head(folders):
    network, calls = load_network(ModelSpec(folders.large)), []
    network.module.get_output_embeddings().register_forward_hook(
        lambda module, inputs, output: calls.append(len(inputs[0]))
    )
    read_few_rows(network)
    for rows in (1, 2, FEW, FEW + 1):
        network.logits(torch.randn(rows, CONFIG["hidden_size"]))
    assert calls == [FEW + 1]


def test_new_weights_are_read(folders):
    """A generator that shares or receives weights samples with the new ones."""
    prompts, sampling = Batch.of(prompt_tokens=[[5, 6, 7]]), Sampling(samples=4, max_tokens=3)
    generator, other = Generator(ModelSpec(folders.large)), Generator(ModelSpec(folders.large))
    changed = [(name, tensor * 2) for name, tensor in other.network.tensors()]
    generator.share(iter(changed))
    other.receive(iter(changed), 1)
    one, two = (each.generate(prompts, sampling, range(4)) for each in (generator, other))
    assert one["tokens"].tolist() == two["tokens"].tolist()
    before = Generator(ModelSpec(folders.large)).generate(prompts, sampling, range(4))
    assert not torch.equal(before["sampled_logprobs"], one["sampled_logprobs"])
