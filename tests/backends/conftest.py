"""Small random models of real architectures, saved as Hugging Face folders with a tokenizer of single
characters.

The fixture `checked` runs the ranks that check backends with ``contract.py``; all tests share one start.
"""

import contextlib
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

CHARACTERS = " abcdefghijklmnopqrstuvwxyz0123456789+-*/=().,:;!?<>[]{}#"
VOCABULARY = 64
EOS = 1

SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
    "bos_token_id": 2,
    "initializer_range": 0.1,
}
GPT2 = GPT2Config(
    vocab_size=VOCABULARY,
    n_embd=32,
    n_layer=2,
    n_head=4,
    n_positions=256,
    eos_token_id=EOS,
    bos_token_id=2,
    pad_token_id=EOS,
    initializer_range=0.1,
)
CONFIGS = {
    "gpt2": GPT2,
    "qwen3": Qwen3Config(**SMALL, tie_word_embeddings=True),
    "llama": LlamaConfig(**SMALL, tie_word_embeddings=False),
    "gemma3": Gemma3TextConfig(
        **SMALL, sliding_window=8, layer_types=["sliding_attention", "full_attention"]
    ),
    "gemma2": Gemma2Config(**SMALL, final_logit_softcapping=3.0, sliding_window=8),
}


def tokenizer():
    vocabulary = {"<unk>": 0, "<eos>": EOS, "<bos>": 2} | {c: i + 3 for i, c in enumerate(CHARACTERS)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", eos_token="<eos>", bos_token="<bos>", pad_token="<eos>"
    )


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Return shape → model folder. ``reward`` is a Llama with a score head."""
    root = tmp_path_factory.mktemp("models")
    for seed, (name, config) in enumerate(CONFIGS.items()):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config).save_pretrained(root / name)
        tokenizer().save_pretrained(root / name)
    torch.manual_seed(99)
    AutoModelForSequenceClassification.from_config(LlamaConfig(**SMALL, num_labels=1)).save_pretrained(
        root / "reward"
    )
    tokenizer().save_pretrained(root / "reward")
    return {path.name: path for path in root.iterdir()}


# Heads of 32, because every engine has kernels for them. Enough positions for real lengths, except for GPT-2,
# which has weights for each position.
WIDE = SMALL | {"num_attention_heads": 2, "head_dim": 32, "max_position_embeddings": 4096}
SHAPES = {
    "qwen3": Qwen3Config(**WIDE, tie_word_embeddings=True),
    "llama": LlamaConfig(**WIDE | {"num_attention_heads": 4}, tie_word_embeddings=False),
    "gpt2": GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=64,
        n_layer=2,
        n_head=2,
        n_positions=256,
        eos_token_id=EOS,
        bos_token_id=2,
        pad_token_id=EOS,
        initializer_range=0.1,
    ),
    "gemma3": Gemma3TextConfig(**WIDE, sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
    "gemma2": Gemma2Config(**WIDE, final_logit_softcapping=3.0, sliding_window=8),
    "one-kv": LlamaConfig(
        **WIDE | {"num_attention_heads": 4, "num_key_value_heads": 1}, tie_word_embeddings=False
    ),
}
SECONDS = 800  # for everything that ranks do; test machines are busy
# backends whose single rank needs no process of its own, and whose two ranks can share processes
IN_PROCESS = ("null", "local", "fsdp")
EXAMPLE = "example.rowwise"  # from docs/backends.md; its single rank is checked here
HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def shapes(tmp_path_factory):
    """Return a folder of models by shape. Several tokens end a response. ``reward`` is a Llama with a score
    head.
    """
    root = tmp_path_factory.mktemp("shapes")
    for name, config in SHAPES.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        model.generation_config.eos_token_id = [EOS, 20, 21]
        model.save_pretrained(root / name)
    torch.manual_seed(99)
    AutoModelForSequenceClassification.from_config(LlamaConfig(**WIDE, num_labels=1)).save_pretrained(
        root / "reward"
    )
    for folder in root.iterdir():
        tokenizer().save_pretrained(folder)
    return root


class CheckedClaims:
    """Results of a backend's claims, from ranks that start at the first request."""

    def __init__(self, models, folder, lacking):
        self.models, self.folder, self.lacking, self.kept = models, folder, lacking, {}

    def check(self, subtests, name, ranks, claims):
        """Assert each claim on each rank, as a subtest of its own. If a package is missing, the test reports
        it.
        """
        assert claims
        self.failures(name, ranks, claims[0])
        for claim in claims:
            with subtests.test(claim):
                assert self.failures(name, ranks, claim) == [""] * ranks

    def failures(self, name, ranks, claim):
        """Return one text per rank, empty if the claim holds."""
        if ranks == 1 and name in (*IN_PROCESS, EXAMPLE):
            return [self._here(name, *claim.split(": ")[:2]).get(claim, "not asked: an earlier claim failed")]
        asked = "contract,own" if name not in IN_PROCESS else "contract" if ": " in claim else "own"
        names = ",".join(IN_PROCESS) if asked == "contract" else name
        if (names, ranks, asked) not in self.kept:
            self.kept[names, ranks, asked] = self._there(names, ranks, asked)
        found = [each[name] for each in self.kept[names, ranks, asked]]
        if "unusable" in found[0]:
            self.lacking(found[0]["unusable"])
        return [each.get(claim, "not asked: an earlier claim failed") for each in found]

    def _here(self, name, half, case):
        if (name, half, case) not in self.kept:
            contract = importlib.import_module("contract")
            ground = contract.Ground(name, 0, 1, self.models, self.folder)
            self.kept[name, half, case] = contract.checked(ground, half, case)
        return self.kept[name, half, case]

    def _there(self, names, ranks, asked):
        """Run the claims in new processes; return the failures by rank, backend and claim. These processes
        cannot compile, and their output is also a claim.
        """
        folder = self.folder / f"{names}-{ranks}-{asked}"
        folder.mkdir()
        outs = [folder / f"{rank}.json" for rank in range(ranks)]
        if {*names.split(",")} <= {*IN_PROCESS}:
            return self._forks(names, folder, outs, asked)
        environment = os.environ | {
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(sys.path),
            "CC": "/nonexistent",
            "CXX": "/nonexistent",
            "TORCH_EXTENSIONS_DIR": str(folder / "compiled"),
        }
        started = []
        for rank, out in enumerate(outs):
            command = [
                sys.executable,
                *map(str, (HERE / "contract.py", names, rank, ranks, folder / "meeting", self.models, out)),
            ]
            started.append(
                subprocess.Popen(
                    command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
                )
            )
        try:
            printed = [process.communicate(timeout=SECONDS)[0] for process in started]
        finally:
            for process in started:
                process.kill()
                process.communicate()
        assert [process.returncode for process in started] == [0] * ranks, "\n".join(
            text[-3000:] for text in printed
        )
        failures = [json.loads(out.read_text()) for out in outs]
        also = [
            {"printed": text, "compiled": str(folder) if (folder / "compiled").exists() else ""}
            for text in printed
        ]
        return [
            {name: claims | more for name, claims in each.items()}
            for each, more in zip(failures, also, strict=True)
        ]

    def _forks(self, names, folder, outs, asked):
        """Run the claims in forks of this process, which has already imported everything."""
        contract, ranks = importlib.import_module("contract"), len(outs)
        children = [
            forked(
                partial(contract.main, names, rank, ranks, folder / "meeting", self.models, out, asked),
                out.with_suffix(".raised"),
            )
            for rank, out in enumerate(outs)
        ]
        try:
            codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        except BaseException:  # the time limit of the test
            for child in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            raise
        assert codes == [0] * ranks, "\n".join(path.read_text() for path in folder.glob("*.raised"))
        return [json.loads(out.read_text()) for out in outs]


def forked(action, raised):
    """Fork a child that runs the function; return its process id. An exception goes to a file."""
    child = os.fork()
    if child:
        return child
    gc.freeze()  # garbage of earlier tests could wait for threads that a fork does not have
    code = 1
    try:
        warnings.simplefilter("ignore")  # warnings are errors in tests
        action()
        code = 0
    except BaseException:
        raised.write_text(traceback.format_exc())
    finally:
        os._exit(code)


@pytest.fixture(scope="session")
def checked(shapes, tmp_path_factory, lacking):
    return CheckedClaims(shapes, tmp_path_factory.mktemp("checked"), lacking)
