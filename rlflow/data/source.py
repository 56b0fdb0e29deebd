"""open_data: from what a user names as data to a data set."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlflow.columns import Kind
from rlflow.data import gym, records
from rlflow.data.dataset import Dataset
from rlflow.data.encode import ByteEncoder, Encoder, TokenizerEncoder, Wording
from rlflow.data.fields import Record, mapped
from rlflow.errors import PlanError


def open_data(
    spec: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    fields: Mapping[str, str | None] | None = None,
    columns: Mapping[str, Kind] | None = None,
    chat: bool | None = None,
    system: str | None = None,
    template: str | None = None,
    max_prompt: int | None = None,
    split: str | None = None,
    task: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Dataset:
    """The data that ``spec`` names: a .jsonl or .parquet file, a Hugging Face dataset folder, or a reasoning-gym task.

    tokenizer: a model folder; without one prompts are encoded as bytes. fields: rlflow's name → the file's, None for none.
    columns: declared columns beyond the standard ones. chat, system, template: see ``Wording``; without ``chat``, prompts are a chat
    where the tokenizer has a chat template, else plain text. max_prompt: records with a longer prompt, in tokens, are dropped and
    counted. split: of a folder that has several. task, seed: a reasoning-gym task's parameters and what its questions are drawn by.
    Raises PlanError.
    """
    encoder: Encoder = TokenizerEncoder(tokenizer) if tokenizer is not None else ByteEncoder()
    wording = Wording(encoder.chats if chat is None else chat, system, template)
    name = os.path.expanduser(os.fspath(spec))
    if _is_task(name):
        _unused({"fields": fields, "split": split}, f"{name} is a reasoning-gym task")
        data = _drawn(name.removeprefix(gym.PREFIX), task or {}, columns or {}, seed)
    else:
        _unused({"task": task}, f"{name} is a file or a folder")
        data = _read(Path(name), fields or {}, columns or {}, split)
    dataset = Dataset(**data, encoder=encoder, wording=wording)
    _check_wording(dataset)
    return dataset if max_prompt is None else _short_enough(dataset, max_prompt)


def _is_task(name: str) -> bool:
    if not name:
        raise PlanError.of("data-missing", "no data is named", expected="a file, a folder, or a reasoning-gym task")
    if name.startswith(gym.PREFIX):
        return True
    path = Path(name)
    return not (path.exists() or path.suffix or len(path.parts) != 1)


def _unused(settings: Mapping[str, object], why: str) -> None:
    for name, value in settings.items():
        if value:
            raise PlanError.of("data-setting", f"'{name}' has no effect: {why}", found=f"{name} = {value}", expected=f"no '{name}'")


def _drawn(task: str, parameters: Mapping[str, Any], columns: Mapping[str, Kind], seed: int) -> dict[str, Any]:
    for name in columns:
        if name not in gym.COLUMNS:
            raise PlanError.of("data-field", f"the reasoning-gym task '{task}' gives no column '{name}'", found="prompt, answer, entry",
                               expected=f"data with a field '{name}'")
    drawn, doubles = gym.draw(task, parameters, seed)
    return {"name": task, "records": drawn, "declared": gym.COLUMNS, "task": gym.scorer(task, parameters), "doubles": doubles}


def _read(path: Path, fields: Mapping[str, str | None], columns: Mapping[str, Kind], split: str | None) -> dict[str, Any]:
    raw = records.read(path, split)
    mapping = mapped(raw[0], fields, columns)
    return {"name": str(path), "records": [mapping.record(item) for item in raw], "declared": columns, "fields": mapping.fields}


def _check_wording(data: Dataset) -> None:
    """Tell of settings that the prompts cannot follow before anything runs, by the first record."""
    data.encoder.prompts([data.wording.of(record) for record in data.records[:1]])


def _short_enough(data: Dataset, limit: int) -> Dataset:
    kept = [record for record, length in zip(data.records, _lengths(data), strict=True) if length <= limit]
    if not kept:
        raise PlanError.of("data-empty", f"every prompt of {data.name} is longer than max_prompt", found=f"max_prompt = {limit}",
                           expected=f"at least {min(_lengths(data))}, the length of its shortest prompt")
    return replace(data, records=kept, dropped=len(data) - len(kept))


def _lengths(data: Dataset, step: int = 1024) -> Iterator[int]:
    for start in range(0, len(data), step):
        chunk: Sequence[Record] = data.records[start : start + step]
        yield from (len(ids) for ids in data.encoder.prompts([data.wording.of(record) for record in chunk]))
