"""The files of a Hugging Face model folder: small files that describe the model and its tokenizer, and the
weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

CONFIG = ("config.json", "generation_config.json")
TOKENIZER = (
    "tokenizer*.json",
    "tokenizer*.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*.json",
    "vocab*.txt",
    "vocab*.bpe",
    "merges.txt",
    "bpe.codes",
    "spiece.model",
    "sentencepiece*.model",
    "spm*.model",
    "*.spm",
    "*.tiktoken",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
    "processor_config.json",
    "preprocessor_config.json",
)
ADAPTER = "adapter_config.json"  # adapters written by peft, which transformers loads with the model
WEIGHTS = (
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
BESIDE = ("value_head.safetensors", "adapter_model.safetensors", "adapter_model.bin")


def small_files(folder: Path, patterns: tuple[str, ...] = (*CONFIG, *TOKENIZER)) -> list[Path]:
    """The files of a model folder except its weights: config, generation config and tokenizer, sorted by
    name. Other files do not belong to the model. Raises OSError."""
    return sorted(
        path
        for path in folder.iterdir()
        if path.is_file() and any(fnmatch(path.name, pattern) for pattern in patterns)
    )


def index_files(folder: Path) -> list[Path]:
    """The index files of weights, and the configuration of adapters."""
    return [
        folder / name for name in (*(index for _, index in WEIGHTS), ADAPTER) if (folder / name).is_file()
    ]


def weight_files(folder: Path) -> list[Path]:
    """The files from which a model is loaded: one weight file or all files of an index, and a value head and
    adapters next to them."""
    files_of_kind = next((files for one, index in WEIGHTS if (files := list(_named(folder, one, index)))), [])
    return [*files_of_kind, *(folder / name for name in BESIDE if (folder / name).is_file())]


def _named(folder: Path, one: str, index: str) -> Iterator[Path]:
    if (folder / one).is_file():
        yield folder / one
    elif (folder / index).is_file():
        try:
            names = sorted(set(json.loads((folder / index).read_bytes())["weight_map"].values()))
        except (ValueError, LookupError, AttributeError, TypeError):
            return  # loading the model reports the damaged index
        yield from (folder / name for name in names if isinstance(name, str) and (folder / name).is_file())


def model_files(folder: Path, role: str) -> dict[str, bytes]:
    """The small files of a model folder that an export needs, as ``ROLE/NAME`` → bytes. Raises OSError."""
    return {f"{role}/{path.name}": path.read_bytes() for path in small_files(folder)}
