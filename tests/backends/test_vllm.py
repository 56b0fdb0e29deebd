"""The vllm backend against the local one and a forward by hand: real engines, in processes of their own (``vllm_worker.py``)."""

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GPT2Config, LlamaConfig, Qwen3Config

from rlflow.backends.local.tokenizer import load_tokenizer
from rlflow.backends.vllm import install

SECONDS = 800
pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS + 60),
              pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make setup")]

VOCABULARY, EOS = 64, 1
TOLERANCE = 2e-5  # of a float32 log-prob; a wrong weight is off by 0.1 and more
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256, "eos_token_id": EOS, "pad_token_id": EOS,
         "bos_token_id": 2, "initializer_range": 0.1}  # vLLM has kernels for heads of 32 and more
CONFIGS = {
    "qwen3": Qwen3Config(**SMALL, tie_word_embeddings=True),
    "llama": LlamaConfig(**SMALL | {"num_attention_heads": 4, "num_key_value_heads": 1}, tie_word_embeddings=False),
    "gpt2": GPT2Config(vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=2, n_positions=256, eos_token_id=EOS, bos_token_id=2,
                       pad_token_id=EOS, initializer_range=0.1),
    "gemma3": Gemma3TextConfig(**SMALL, sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
}


def started(task, models, shapes, out, *rank):
    """An engine's process, which has minutes for what takes seconds: machines that test are busy."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    worker = Path(__file__).with_name("vllm_worker.py")
    command = [sys.executable, *map(str, (worker, task, models, ",".join(shapes), out, *rank))]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finished(process, out):
    try:
        said = process.communicate(timeout=SECONDS)[0]
    finally:
        process.kill()
    assert process.returncode == 0, said[-3000:]
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def models(folders, tmp_path_factory):
    root = tmp_path_factory.mktemp("vllm")
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(root / name)
        load_tokenizer(folders["gpt2"]).save_pretrained(root / name)
    shutil.copytree(folders["qwen3"], root / "narrow")  # heads of 8
    return root


@pytest.fixture(scope="module")
def alone(models, tmp_path_factory):
    """What an engine alone in its process gave, by shape; all four share the process."""
    out = tmp_path_factory.mktemp("alone") / "found.json"
    return finished(started("one", models, CONFIGS, out), out)


def pair(task, models, shapes, folder):
    outs = [folder / f"{rank}.json" for rank in (0, 1)]
    processes = [started(task, models, shapes, out, rank) for rank, out in enumerate(outs)]
    return [finished(process, out) for process, out in zip(processes, outs, strict=True)]


@pytest.fixture(params=list(CONFIGS))
def found(alone, request):
    return alone[request.param]


def test_sampled_logprobs_are_those_of_a_forward_truncated_as_they_were(found):
    assert max(found["by_hand"]) < TOLERANCE
    assert found["greedy"][0] == found["greedy"][1]


def test_columns_are_those_of_the_local_backend(found):
    assert found["kinds"][0] == found["kinds"][1]
    assert found["dtypes"][0] == found["dtypes"][1]
    assert found["group"][0] == found["group"][1] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert found["prompts"] == [text for text in ("2+2=", "a", "the quick brown fox", "x = y") for _ in range(3)]
    assert found["temperature"] == [[1.0] * 4, [0.5] * 4]
    assert found["completion"] == found["text"]
    assert found["empty"] == 0


def test_a_rows_tokens_depend_on_its_prompt_its_seed_and_the_weights_alone(found):
    assert found["together"] == found["apart"] == found["again"]
    assert found["together"] != found["other"]
    assert found["together"][0] != found["together"][1]


def test_rows_end_by_any_end_of_sequence_token_and_by_length(found):
    tokens, finish, completion = found["free"]
    assert {"stop", "length"} == set(finish)
    assert len({row[-1] for row, why in zip(tokens, finish, strict=True) if why == "stop"}) > 1
    for row, why, text in zip(tokens, finish, completion, strict=True):
        assert row[-1] in (EOS, 20, 21) if why == "stop" else len(row) == 40
        assert not {EOS, 20, 21} & set(row[:-1])
        assert len(text) <= len(row) - (why == "stop")


def test_a_stop_string_ends_a_row_and_stays_in_it(found):
    stop, ended = found["stop"], 0
    (free_tokens, _, free_text), (tokens, finish, completion) = found["free"], found["stopped"]
    for free, before, row, why, text in zip(free_tokens, free_text, tokens, finish, completion, strict=True):
        if stop in before:
            ended += 1
            assert text == before[: before.index(stop) + len(stop)]
            assert why == "stop"
        else:
            assert row == free
    assert ended


def test_received_weights_are_what_is_sampled_from(found):
    assert found["stale"] > 100 * TOLERANCE
    assert found["fresh"] < TOLERANCE
    assert found["scored"] < TOLERANCE
    assert found["versions"] == [[0], [7]]
    assert found["written"] < TOLERANCE
    assert found["written_version"] == 8


def test_weights_that_come_while_rows_grow_are_told_by_their_tokens(found):
    assert found["settled"] < TOLERANCE
    for row in found["spans"]:
        assert row == sorted(row)
        assert set(row) == {8, 20}


def test_what_cannot_be_done_is_said(found):
    said = found["refusals"]
    assert "found an empty prompt" in said["empty"]
    assert "found 1 seeds, expected one per row: 8" in said["seeds"]
    assert "found a prompt of 19 tokens and max_tokens 300, expected at most 256" in said["long"]
    assert "expected 0 or at least 0.01" in said["cold"]
    assert "nonsense" in said["unknown"]
    assert "found no weights for" in said["missing"]
    assert "[3]" in said["misshapen"]


def test_an_engines_error_reaches_the_caller_and_the_engine_goes_on(found):
    assert found["broken"] == "the third layer is on fire"
    assert found["mended"]


def test_a_model_without_kernels_is_refused_before_anything_is_sampled(alone):
    assert alone["qwen3"]["narrow"].startswith("PlanError")
    assert "head_dim=8" in alone["qwen3"]["narrow"]
    assert "--ROLE.generator local" in alone["qwen3"]["narrow"]


def test_the_install_command_leaves_what_is_there(capsys):
    assert install.main() == 0
    assert any(words in capsys.readouterr().out for words in ("is there", "is for GPUs"))


def test_an_engine_leaves_its_process_as_it_was(alone):
    for found in alone.values():
        assert found["healthy"]
        assert found["threads"]
        assert not [name for name in found["left"] if not name.startswith("VLLM_")]


def test_ranks_with_an_engine_each_sample_different_rows_or_none(models, tmp_path):
    first, second = (found["qwen3"] for found in pair("engines", models, ["qwen3"], tmp_path))
    assert [len(rank["first"]) for rank in (first, second)] == [6, 2]
    assert [rank["none"] for rank in (first, second)] == [[2], [0, 2]]
    assert max(first["fresh"], second["fresh"]) < TOLERANCE
    assert first["group"] == second["group"] == 2


def test_ranks_that_share_an_engine_sample_as_one(models, tmp_path):
    """Of the Llama shape, the ranks have the same key-value head."""
    both = pair("shared", models, ["llama", "gpt2"], tmp_path)
    for ours, theirs in ((both[0][shape], both[1][shape]) for shape in ("llama", "gpt2")):
        assert max(ours["by_hand"]) < TOLERANCE
        assert ours["fresh"] < TOLERANCE
        assert ours["tokens"] == theirs["tokens"]
        assert ours["stopped"] == theirs["stopped"]
        assert "found different rows" in ours["different"]
        assert "found different rows" in theirs["different"]
        assert ours["segments"] == theirs["segments"] == []
        embedding = next(shape for name, shape in ours["shapes"].items() if name.endswith(("embed_tokens.weight", "wte.weight")))
        assert embedding[0] == VOCABULARY // 2
