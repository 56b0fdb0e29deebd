"""Fetches models and data sets from the Hugging Face Hub, or from its cache on this machine.

All access to the Hub goes through this module. It uses ``huggingface_hub`` and ``datasets``, so their
variables (HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE) apply. A name is first pinned to a commit, and if
that commit is completely in the cache, nothing is downloaded. No code from a repository is ever executed.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlflow.data.hub_names import HubName
from rlflow.data.hub_refusals import refusal, unreachable, which_config
from rlflow.errors import PlanError, listed
from rlflow.extras import require

WEIGHTS = ("*.safetensors",)
# Files that describe a model: configs, tokenizers, chat templates and the index of weights.
SMALL = (
    "*.json",
    "*.jinja",
    "*.txt",
    "*.bpe",
    "*.spm",
    "*.tiktoken",
    "tokenizer*.model",
    "spiece.model",
    "sentencepiece*.model",
    "spm*.model",
    "bpe.codes",
)
# The same weights in another form, or other models in folders of the repository.
OTHERS = ("*/*.safetensors", "onnx/*", "openvino/*", "original/*", "consolidated*.safetensors")
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
CARD = ("README.md", ".gitattributes")  # small files that almost every repository has


def pinned(name: HubName) -> HubName:
    """Pin a name to the commit that its revision points to now.

    This asks the Hub. If the Hub can't be reached, the last commit fetched for this revision is used. Raises
    PlanError if there is none.
    """
    if name.commit:
        return name
    folder = _snapshot(name, (*SMALL, *CARD) if name.kind == "model" else CARD)
    return replace(name, revision=folder.name)


def described_model(name: HubName) -> Path:
    """Return a pinned model's folder in the cache, with its config and tokenizer, and maybe without weights.

    Raises PlanError if the files are neither in the cache nor on the Hub.
    """
    folder = _cached(name, SMALL)
    if folder is None or not (folder / "config.json").is_file():
        folder = _snapshot(name, (*SMALL, *CARD))
    if not (folder / "config.json").is_file():
        raise PlanError.of(
            "hub-model",
            f"the repository '{name.repository}' does not contain a model",
            found=f"no config.json at {name.shown}; it contains {listed(_entries(folder))}",
            expected="a model with config.json and weights as safetensors",
            remedy="name a repository with a model, or a local model folder",
        )
    return folder


def complete_model(name: HubName, note: Callable[[str], object] = print) -> Path:
    """Return a pinned model's folder in the cache, with all its files.

    ``note``: called with a message before a download. Raises PlanError if the files are neither in the cache
    nor on the Hub.
    """
    folder = described_model(name)
    if lacking_weights(folder):
        note(f"downloading the weights of {name.shown} to {folder}")
        folder = _snapshot(name, (*SMALL, *CARD, *WEIGHTS))
    if lacking := lacking_weights(folder):
        raise PlanError.of(
            "hub-weights",
            f"the repository '{name.repository}' has no weights that rlflow can load",
            found=f"no {listed(lacking)} at {name.shown}",
            expected="weights as safetensors, which load without executing code",
            remedy="use a repository with safetensors, or convert the weights in a local folder",
        )
    return folder


def lacking_weights(folder: Path) -> list[str]:
    """Return the weight files missing from a folder of the cache. Empty if it's complete."""
    if (folder / SINGLE).is_file():
        return []
    try:
        named = json.loads((folder / INDEX).read_bytes())["weight_map"].values()
    except (OSError, ValueError, LookupError, AttributeError, TypeError):
        return [SINGLE]
    return sorted({str(file) for file in named if not (folder / str(file)).is_file()})


def load_data(name: HubName) -> dict[str, Any]:
    """Return the rows of a data set by split. The rows stay on disk, in the cache of ``datasets``.

    Raises PlanError if the data set is neither in the cache nor on the Hub, or if it has several configs and
    the name doesn't say which.
    """
    require("datasets", extra="tasks")
    name = pinned(name)
    folder = _prepared(name) if name.config else None
    return _splits(folder if folder is not None else _prepare(name))


def streamed_data(name: HubName) -> dict[str, Iterable[Mapping[str, Any]]]:
    """Return the rows of a data set by split. They are downloaded while they are read, and not kept on disk.

    If the rows are already in the cache of ``datasets``, they come from there. Raises PlanError as
    ``load_data`` does, also while the rows are read.
    """
    require("datasets", extra="tasks")
    name = pinned(name)
    if name.config and (folder := _prepared(name)) is not None:
        return _splits(folder)
    try:
        splits = _builder(name).as_streaming_dataset()
    except Exception as error:
        raise _refused(name, error) from error
    return {split: _Streamed(name, rows) for split, rows in splits.items()}


@dataclass(frozen=True)
class _Streamed:
    """The rows of a split. Each iteration downloads them again."""

    name: HubName
    rows: Iterable[Mapping[str, Any]]

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        try:
            yield from self.rows
        except Exception as error:
            raise refusal(self.name, error) from error


def _prepared(name: HubName) -> Path | None:
    """Return the folder with a pinned data set's prepared rows, or None if they aren't in the cache."""
    import datasets

    owner, _, stem = name.repository.partition("/")
    root = Path(datasets.config.HF_DATASETS_CACHE)
    snake = datasets.naming.camelcase_to_snakecase(stem)
    found = [
        path
        for path in root.glob(f"{owner}___{snake}/*/*/{name.commit}")
        if (path / "dataset_info.json").is_file() and name.config in (None, path.parent.parent.name)
    ]
    if len(found) > 1:
        raise which_config(name, [path.parent.parent.name for path in found])
    return found[0] if found else None


def _prepare(name: HubName) -> Path:
    """Download a pinned data set, and return the folder with its prepared rows."""
    try:
        builder = _builder(name)
        builder.download_and_prepare()
    except Exception as error:
        if unreachable(error) and (folder := _prepared(name)) is not None:
            return folder
        raise _refused(name, error) from error
    return Path(builder.cache_dir)


def _builder(name: HubName) -> Any:
    """Return the object of ``datasets`` that reads a pinned data set, with the errors of ``datasets``."""
    import datasets

    _no_bars_in_files()
    builder = datasets.load_dataset_builder(name.repository, name.config, revision=name.commit)
    if builder.hash != name.commit:  # the Hub was not reached, and datasets took another commit's rows
        raise ConnectionError(f"{name.shown} is not in the cache")
    return builder


def _refused(name: HubName, error: Exception) -> PlanError:
    import datasets

    if "onfig" in str(error) and isinstance(error, ValueError):
        return which_config(name, datasets.get_dataset_config_names(name.repository, name.commit))
    return refusal(name, error)


def _splits(folder: Path) -> dict[str, Any]:
    """Return the rows in a folder of prepared rows, by split."""
    import datasets

    names = json.loads((folder / "dataset_info.json").read_text("utf-8"))["splits"]
    return {
        split: datasets.concatenate_datasets([datasets.Dataset.from_file(str(file)) for file in files])
        for split in names
        if (files := _arrow_files(folder, split))
    }


def _arrow_files(folder: Path, split: str) -> list[Path]:
    return sorted([*folder.glob(f"*-{split}.arrow"), *folder.glob(f"*-{split}-*-of-*.arrow")])


def _cached(name: HubName, patterns: Sequence[str]) -> Path | None:
    """Return the folder of a pinned name if the cache has these files, or None. Doesn't use the network."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    with contextlib.suppress(LocalEntryNotFoundError):
        return _folder(name, patterns, only_cached=True)
    return None


def _snapshot(name: HubName, patterns: Sequence[str]) -> Path:
    """Return a name's folder in the cache, after fetching those of these files that it lacks."""
    _no_bars_in_files()
    try:
        return _folder(name, patterns)
    except Exception as error:
        raise refusal(name, error) from error


def _folder(name: HubName, patterns: Sequence[str], only_cached: bool = False) -> Path:
    """Return a name's folder in the cache, with huggingface_hub's own errors."""
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            name.repository,
            repo_type=name.kind,
            revision=name.revision,
            allow_patterns=list(patterns),
            ignore_patterns=list(OTHERS),
            local_files_only=only_cached,
        )
    )


def _no_bars_in_files() -> None:
    """Hide the progress bars of downloads unless they are shown on a terminal."""
    if not sys.stderr.isatty():
        from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

        disable_progress_bars()
        if "datasets" in sys.modules:
            sys.modules["datasets"].disable_progress_bars()


def _entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
