"""A small tokenizer made by the tests: one token per byte, BOS before a text, and a chat template."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer(folder: Path, chat: bool = True, eos: bool = True) -> Path:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<bos>", "<eos>", *letters])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 0), ("<eos>", 1)]
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<bos>", eos_token="<eos>" if eos else None
    )
    made.chat_template = TEMPLATE if chat else None
    made.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session", name="make_tokenizer")
def maker() -> Callable[..., Path]:
    return make_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes records, or complete lines, to a file."""

    def write(*records: Any, name: str = "data.jsonl") -> Path:
        path = tmp_path / name
        path.write_text(
            "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in records)
        )
        return path

    return write
