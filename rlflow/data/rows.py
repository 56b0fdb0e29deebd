"""Turns records into a batch.

Each record is one row. A preference pair is two adjacent rows: the chosen response, then the rejected one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlflow.author.axis import Axis
from rlflow.author.batch import DTYPES, Batch, Data
from rlflow.author.columns import MODEL_PROMPT, PROMPT_ID, TABLE, Kind, Level
from rlflow.author.messages import Message, as_text
from rlflow.data.encode import Encoder, Wording
from rlflow.data.fields import Record
from rlflow.data.turns import answered, joined


def kinds(like: Record, declared: Mapping[str, Kind], model_prompt: bool = False) -> dict[str, Kind]:
    """Return the kind of each column that ``batch`` returns for records like ``like``, by name."""
    names = ["prompt", *(["answer"] if like.answer is not None else []), "prompt_tokens"]
    names += ["completion", "tokens", "mask", "finish"] if like.responses else []
    names += ["group", "chosen"] if len(like.responses) == 2 else []
    more = dict(declared) | ({MODEL_PROMPT: Kind(Level.TEXT)} if model_prompt else {})
    return {name: TABLE[name].kind for name in names} | {name: _settled(kind) for name, kind in more.items()}


def batch(
    records: Sequence[Record],
    like: Record,
    positions: Sequence[int],
    encoder: Encoder,
    wording: Wording,
    declared: Mapping[str, Kind],
    numbered: bool = False,
    model_prompt: bool = False,
) -> Batch:
    """Return the records as rows.

    ``positions``: each record's position in the data stream. ``like``: a record of the same shape, which
    determines the columns even if ``records`` is empty. ``declared``: the kinds of further columns, by name.
    ``numbered``: True to add the column ``prompt_id`` with each record's number. ``model_prompt``: True to
    add the column MODEL_PROMPT with the prompt's text as the model reads it.
    """
    copies = max(len(like.responses), 1)
    repeated = [record for record in records for _ in range(copies)]
    wordings = [wording.of(record) for record in records]
    prompts = encoder.prompts(wordings)
    data = {"prompt": _text([record.question for record in repeated])}
    if like.answer is not None:
        data["answer"] = _text([record.answer or "" for record in repeated])
    data["prompt_tokens"] = _ragged("prompt_tokens", [ids for ids in prompts for _ in range(copies)])
    data |= {
        name: _declared(kind, [record.more[name] for record in repeated]) for name, kind in declared.items()
    }
    if model_prompt:
        data[MODEL_PROMPT] = _text([text for text in encoder.worded(wordings) for _ in range(copies)])
    if numbered:
        data[PROMPT_ID] = _declared(TABLE[PROMPT_ID].kind, [record.number for record in repeated])
    axis = _axis(positions, pairs=copies == 2)
    return Batch(axis, data | dict(_responses(records, wordings, encoder, axis) if like.responses else ()))


def _axis(positions: Sequence[int], pairs: bool) -> Axis:
    copies = 2 if pairs else 1
    position = torch.tensor(positions, dtype=torch.int64).repeat_interleave(copies)
    return Axis(torch.stack([position, torch.arange(copies).repeat(len(positions))], 1), grouped=pairs)


def _responses(
    records: Sequence[Record], wordings: Sequence[str | list[Message]], encoder: Encoder, axis: Axis
) -> Iterator[tuple[str, Data]]:
    exchanges = [
        (prompt, response)
        for prompt, record in zip(wordings, records, strict=True)
        for response in record.responses
    ]
    rows = list(map(joined, answered(encoder, exchanges)))
    tokens = _ragged("tokens", [ids for ids, _ in rows])
    yield "completion", _text([as_text(response) for _, response in exchanges])
    yield "tokens", tokens
    yield (
        "mask",
        Data(
            TABLE["mask"].kind,
            torch.tensor([counts for _, mask in rows for counts in mask], dtype=torch.bool),
            tokens.lengths,
        ),
    )
    yield "finish", _text(["stop"] * len(exchanges))
    if axis.grouped:
        yield "group", Data(TABLE["group"].kind, axis.keys[:, 0].clone())
        yield "chosen", Data(TABLE["chosen"].kind, axis.keys[:, 1] == 0)


def _text(values: Sequence[str]) -> Data:
    return Data(Kind(Level.TEXT), tuple(values))


def _ragged(name: str, rows: Sequence[Sequence[int]]) -> Data:
    flat = torch.tensor([token for row in rows for token in row], dtype=torch.int64)
    return Data(TABLE[name].kind, flat, torch.tensor([len(row) for row in rows], dtype=torch.int64))


def _declared(kind: Kind, values: Sequence[Any]) -> Data:
    kind = _settled(kind)
    if kind.level is Level.TEXT:
        return _text(values)
    value: Tensor = torch.tensor(values, dtype=getattr(torch, kind.dtype or "float32"))
    return Data(kind, value)


def _settled(kind: Kind) -> Kind:
    """Add a dtype to a column's kind if it lacks one. Numbers without a declared dtype are float32."""
    if kind.level is Level.TEXT or kind.dtype in {
        str(dtype).removeprefix("torch.") for dtype in DTYPES.values()
    }:
        return kind
    dtype = DTYPES.get(kind.family or "float", torch.float32)
    return Kind(kind.level, kind.dtype or str(dtype).removeprefix("torch."))
