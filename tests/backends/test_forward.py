"""A Trainer computes for a padded batch the same as a plain Hugging Face forward for each row alone."""

import json
import shutil

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Qwen3Config, modeling_utils

from rlflow import loss
from rlflow.author.batch import Batch, padding
from rlflow.backends.local import Trainer
from rlflow.backends.local.logprobs import logprobs_and_entropy
from rlflow.errors import PlanError
from rlflow.training.protocols import ModelSpec

SHAPES = ["gpt2", "qwen3", "llama", "gemma3", "gemma2"]
PROMPTS = [[5, 9, 11], [7], [4, 4, 8, 20, 33, 12, 9, 8, 7, 6, 5]]
TOKENS = [[12, 40, 3, 1], [1, 1, 60, 8, 9, 10, 11, 12, 13], [30]]  # 1 is EOS and padding


def batch(**more):
    return Batch.of(prompt_tokens=PROMPTS, tokens=TOKENS, mask=[[True] * len(t) for t in TOKENS], **more)


def rows_of(column):
    return torch.split(column.value, column.lengths.tolist())


@torch.no_grad()
def alone(model, prompt, tokens, temperature=1.0):
    """Return (log-probs, entropy) of each response token, without padding, from the full logits."""
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1] / temperature
    distribution = logits.log_softmax(-1)
    return distribution[torch.arange(len(tokens)), tokens], -(distribution.exp() * distribution).sum(-1)


@pytest.mark.parametrize("shape", SHAPES)
def test_logprobs_and_entropy_equal_a_plain_forward_row_by_row(folders, shape):
    temperatures = [1.0, 0.7, 2.5]
    with padding(float("nan")):
        got = Trainer(ModelSpec(folders[shape])).forward(
            batch(temperature=temperatures), ("logprobs", "entropy")
        )
    model = AutoModelForCausalLM.from_pretrained(folders[shape], dtype=torch.float32).eval()
    for i, (prompt, tokens, temperature) in enumerate(zip(PROMPTS, TOKENS, temperatures, strict=True)):
        logprobs, entropy = alone(model, prompt, tokens, temperature)
        torch.testing.assert_close(rows_of(got.data["logprobs"])[i], logprobs, atol=2e-6, rtol=0)
        torch.testing.assert_close(rows_of(got.data["entropy"])[i], entropy, atol=2e-6, rtol=0)


def test_the_temperature_is_one_without_a_column(folders):
    trainer = Trainer(ModelSpec(folders["llama"]))
    assert torch.equal(
        trainer.forward(batch())["logprobs"], trainer.forward(batch(temperature=[1.0] * 3))["logprobs"]
    )


def test_values_depend_on_the_prefix_and_not_on_the_temperature(folders):
    trainer = Trainer(ModelSpec(folders["qwen3"], head="values", trained=True))
    assert not trainer.forward(batch(), ("values",)).data["values"].value.any()  # a new head gives 0
    torch.nn.init.normal_(trainer.network.head.weight, generator=torch.Generator().manual_seed(0))
    got = trainer.forward(batch(temperature=[0.1, 3.0, 1.0]), ("values",))
    model = AutoModelForCausalLM.from_pretrained(folders["qwen3"], dtype=torch.float32).eval()
    for i, (prompt, tokens) in enumerate(zip(PROMPTS, TOKENS, strict=True)):
        hidden = model.model(torch.tensor([prompt + tokens])).last_hidden_state[0]
        expected = trainer.network.head(hidden)[len(prompt) - 1 : -1, 0]
        torch.testing.assert_close(rows_of(got.data["values"])[i], expected.detach(), atol=1e-5, rtol=1e-5)


def test_a_value_does_not_depend_on_its_own_token(folders):
    trainer = Trainer(ModelSpec(folders["gpt2"], head="values", trained=True))
    torch.nn.init.normal_(trainer.network.head.weight)
    a, b = (
        trainer.forward(Batch.of(prompt_tokens=[[5, 6]], tokens=[[7, last]]), ("values",))["values"]
        for last in (8, 9)
    )
    assert torch.equal(a, b)


def test_scores_are_read_after_the_last_token_despite_eos_padding(folders):
    got = Trainer(ModelSpec(folders["reward"], head="scores")).forward(batch(), ("scores",))
    model = AutoModelForSequenceClassification.from_pretrained(folders["reward"]).eval()
    for i, (prompt, tokens) in enumerate(zip(PROMPTS, TOKENS, strict=True)):
        hidden = model.model(torch.tensor([prompt + tokens])).last_hidden_state[0, -1]
        torch.testing.assert_close(got["scores"][i], model.score(hidden)[0].detach(), atol=2e-6, rtol=0)


def test_forward_keeps_the_order_of_rows_in_any_micro_batches(folders):
    whole = Trainer(ModelSpec(folders["llama"])).forward(batch(), ("logprobs",))
    one = Trainer(ModelSpec(folders["llama"]), Trainer.Settings(micro_tokens=1)).forward(
        batch(), ("logprobs",)
    )
    torch.testing.assert_close(whole["logprobs"], one["logprobs"], atol=2e-6, rtol=0)
    assert whole.axis is not one.axis
    assert Trainer(ModelSpec(folders["llama"])).forward(batch().rows([]), ("logprobs",))[
        "logprobs"
    ].shape == (0, 0)


def test_bfloat16_trains_float32_weights(folders):
    frozen = Trainer(ModelSpec(folders["llama"], dtype="bfloat16"))
    trained = Trainer(ModelSpec(folders["llama"], dtype="bfloat16", trained=True))
    assert next(frozen.network.module.parameters()).dtype is torch.bfloat16
    assert next(trained.network.module.parameters()).dtype is torch.float32
    exact = Trainer(ModelSpec(folders["llama"])).forward(batch())["logprobs"]
    for trainer in (frozen, trained):
        got = trainer.forward(batch())["logprobs"]
        assert got.dtype is torch.float32
        torch.testing.assert_close(got, exact, atol=0.05, rtol=0)


def test_an_empty_prompt_is_refused(folders):
    with pytest.raises(ValueError, match="empty prompt in row 0, expected at least one token"):
        Trainer(ModelSpec(folders["gpt2"])).forward(
            Batch.of({"prompt_tokens": [torch.zeros(0, dtype=torch.int64)], "tokens": [[4]]})
        )


def test_a_model_computes_only_the_outputs_of_its_head(folders):
    with pytest.raises(ValueError, match="asked for 'values', but this model's head gives logprobs, entropy"):
        Trainer(ModelSpec(folders["gpt2"])).forward(batch(), ("values",))


def test_saving_does_not_search_for_a_wrapper_of_the_model(folders, tmp_path, monkeypatch):
    # accelerate's search, which imports DeepSpeed
    monkeypatch.setattr(modeling_utils, "extract_model_from_parallel", None, raising=False)
    Trainer(ModelSpec(folders["llama"])).save(tmp_path / "saved")
    assert (tmp_path / "saved" / "model.safetensors").is_file()


def test_an_invalid_generation_config_is_saved_unchanged(folders, tmp_path):
    folder = shutil.copytree(folders["llama"], tmp_path / "model")
    (folder / "generation_config.json").write_text(
        json.dumps({"top_k": 7, "temperature": 0.5, "eos_token_id": [1, 2]})
    )
    trainer = Trainer(ModelSpec(folder))
    for name in ("saved", "again"):
        trainer.save(tmp_path / name)
    written = json.loads((tmp_path / "again" / "generation_config.json").read_text())
    assert {name: written.get(name) for name in ("top_k", "temperature", "eos_token_id", "do_sample")} == {
        "top_k": 7,
        "temperature": 0.5,
        "eos_token_id": [1, 2],
        "do_sample": None,
    }


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("model.safetensors", "short", "header"),
        ("model.safetensors", None, "no file named model.safetensors"),
        ("config.json", '{"model_type": "unheard-of"}', "unheard-of"),
    ],
)
def test_an_unreadable_folder_is_a_plan_error(folders, tmp_path, file, text, says):
    folder = shutil.copytree(folders["llama"], tmp_path / "damaged")
    (folder / file).unlink()
    if text is not None:
        (folder / file).write_text(text)
    with pytest.raises(PlanError, match=rf"damaged' cannot be loaded\n +found: .*{says}"):
        Trainer(ModelSpec(folder))


def test_unsuitable_folders_are_plan_errors(folders, tmp_path):
    for spec, message in [
        (ModelSpec(tmp_path), "needs a Hugging Face model folder"),
        (ModelSpec(folders["reward"]), "lacks weights"),
        (ModelSpec(folders["llama"], head="scores"), "without a score head"),
        (ModelSpec(folders["llama"], trained=True, dtype="float16"), "loss scaling"),
    ]:
        with pytest.raises(PlanError, match=message):
            Trainer(spec)


@pytest.mark.parametrize("entropy", [False, True])
def test_chunks_of_logits_change_no_number_and_no_gradient(entropy):
    torch.manual_seed(0)
    weight = torch.randn(50, 8, dtype=torch.float64, requires_grad=True)
    hidden = torch.randn(23, 8, dtype=torch.float64, requires_grad=True)
    targets, temperature = torch.randint(50, (23,)), torch.rand(23, dtype=torch.float64) + 0.5
    results = []
    for tokens in (1, 7, 100):
        pair = logprobs_and_entropy(
            lambda h: h @ weight.T, hidden, targets, temperature, tokens=tokens, entropy=entropy
        )
        total = sum((x.square().sum() for x in pair if x is not None), torch.zeros(()))
        results.append([*pair, *torch.autograd.grad(total, (weight, hidden))])
    for other in results[:2]:
        for a, b in zip(results[2], other, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("entropy", [False, True])
def test_a_gradient_in_place_of_logits_is_the_same_single_tensor(entropy):
    torch.manual_seed(0)
    weight, hidden = (torch.randn(size, 8, dtype=torch.float64, requires_grad=True) for size in (50, 23))
    targets, temperature = torch.randint(50, (23,)), torch.rand(23, dtype=torch.float64) + 0.5
    gradients, seen = [], []
    for once in (False, True):

        def logits(hidden):
            seen.append(hidden @ weight.T)
            return seen[-1]

        pair = logprobs_and_entropy(
            logits, hidden, targets, temperature, tokens=100, entropy=entropy, once=once
        )
        total = sum((x.square().sum() for x in pair if x is not None), torch.zeros(()))
        before = seen[-1].detach().clone()
        gradients.append(torch.autograd.grad(total, (weight, hidden), retain_graph=True))
        assert torch.equal(seen[-1], before) is not once  # no other tensor is as large
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("once", [False, True])
def test_no_temperature_equals_a_temperature_of_1_exactly(dtype, entropy, once):
    torch.manual_seed(0)
    weight, hidden = (torch.randn(size, 8, dtype=dtype, requires_grad=True) for size in (50, 23))
    targets, results = torch.randint(50, (23,)), []
    for temperature in (None, torch.ones(23)):
        pair = logprobs_and_entropy(
            lambda h: h @ weight.T, hidden, targets, temperature, tokens=9, entropy=entropy, once=once
        )
        total = sum((x.square().sum() for x in pair if x is not None), torch.zeros(()))
        results.append([*(x for x in pair if x is not None), *torch.autograd.grad(total, (weight, hidden))])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


class Largest(TorchDispatchMode):
    """Record the number of entries of the largest tensor of any operation."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor) and not tensor.is_sparse:
                self.entries = max(self.entries, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


def test_logits_of_a_large_vocabulary_are_computed_in_chunks(tmp_path):
    """150k words, 96 response tokens, 16 at a time: no tensor of an update has more entries than 16 × 150k or
    the head's weight.
    """
    vocabulary, tokens = 150_000, 16
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    trainer = Trainer(ModelSpec(tmp_path, trained=True), Trainer.Settings(logit_tokens=tokens))
    rows = Batch.of(prompt_tokens=[[5]] * 2, tokens=[list(range(48))] * 2, mask=[[True] * 48] * 2)

    @loss(new=("logprobs", "entropy"))
    def likelihood(new, mask):
        return -new.logprobs - new.entropy, {}

    with Largest() as largest:
        trainer.update(rows, likelihood)
        trainer.forward(rows, ("logprobs", "entropy"))
    assert largest.entries == tokens * vocabulary
