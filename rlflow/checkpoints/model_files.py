"""Find the files of a Hugging Face model folder: weights, config, tokenizer and so on."""

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
    """Return the sorted paths of a model folder's config, generation config and tokenizer files.

    ``patterns``: the file name patterns to look for. Raises OSError.
    """
    return sorted(
        path
        for path in folder.iterdir()
        if path.is_file() and any(fnmatch(path.name, pattern) for pattern in patterns)
    )


def index_files(folder: Path) -> list[Path]:
    """Return the paths of the weights' index files and of the adapter's config, if there are any."""
    return [
        folder / name for name in (*(index for _, index in WEIGHTS), ADAPTER) if (folder / name).is_file()
    ]


def weight_files(folder: Path) -> list[Path]:
    """Return the paths of a model's weight files.

    These are a single weights file or all files listed in an index, plus those of a value head and an
    adapter.
    """
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
    """Read the `small_files` of a role's model, as ``ROLE/NAME`` → bytes. Raises OSError."""
    return {f"{role}/{path.name}": path.read_bytes() for path in small_files(folder)}
