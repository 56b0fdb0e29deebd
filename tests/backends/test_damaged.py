"""Model folders with invalid numbers are refused with a message before any computation."""

import json
import shutil
from dataclasses import replace

import pytest
from safetensors.torch import load_file, save_file
from sources import TASKS

from rlflow.backends.local import Generator
from rlflow.backends.local.network import load_network
from rlflow.errors import PlanError
from rlflow.training.protocols import ModelSpec

MODEL = TASKS / "arithmetic_model"


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(MODEL, tmp_path / "model")


def spec(folder):
    return ModelSpec(folder, "logprobs", True, "cpu", "float32", 0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, -1])
def test_non_finite_weights_are_refused_by_name(folder, value, place):
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.gate_proj.weight"
    weights[name].view(-1)[place] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(PlanError, match=rf"(?s)not finite.*{name}") as refused:
        load_network(spec(folder))
    assert "another with --model" in str(refused.value)


def change(file, **entries):
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


def test_weights_of_unexpected_shapes_are_refused_with_both_shapes(folder):
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    change(folder / "config.json", vocab_size=size + 7)
    with pytest.raises(
        PlanError, match=rf"(?s)embed_tokens.weight \[{size}, \d+\], not \[{size + 7}, \d+\].*vocab_size"
    ):
        load_network(spec(folder))


@pytest.mark.parametrize(("named", "refused"), [(99_999, True), ([99_999, -3], True), ([99_999, 1], False)])
def test_a_model_with_only_unknown_end_tokens_is_refused(folder, named, refused):
    change(folder / "config.json", eos_token_id=named)
    change(folder / "generation_config.json", eos_token_id=named)
    change(folder / "tokenizer_config.json", eos_token=None)
    if refused:
        with pytest.raises(PlanError, match=r"(?s)no response can end.*99999.*generation_config\.json"):
            Generator(spec(folder))
    else:
        assert Generator(spec(folder)).eos == [1]


def test_rows_end_at_tokens_of_the_run_or_of_tokenizer_and_config(folder):
    change(folder / "generation_config.json", eos_token_id=[7])
    assert Generator(spec(folder)).eos == [1, 7]
    assert Generator(replace(spec(folder), ends=(3, 9, 99_999))).eos == [3, 9]
