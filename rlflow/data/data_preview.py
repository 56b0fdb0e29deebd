"""Shows a data set as a model will read it.

A preview lists the mapped fields, the lengths, the skipped records, and the first few rows in full.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rlflow.data.dataset import Dataset
from rlflow.data.encode import END, ByteEncoder, Encoder, TokenizerEncoder
from rlflow.data.faults import Fault, counted
from rlflow.data.pairs import equal_pairs, told
from rlflow.data.spoken import special_tokens

if TYPE_CHECKING:
    from rlflow.author.batch import Batch

STEP = 1024  # records that are encoded at once
PLACES = 8  # maximum number of places listed for each cause


@dataclass(frozen=True)
class LengthSummary:
    """Lengths in tokens, summarized over all usable records."""

    count: int
    shortest: int
    median: int
    longest_of_95: int  # the 95th percentile
    longest: int


@dataclass(frozen=True)
class Text:
    """A string decoded from token ids, as a model reads it."""

    text: str
    ids: tuple[int, ...]
    special: Mapping[int, str]  # position among the ids → the token's text


@dataclass(frozen=True)
class PreviewRow:
    """One row of a preview. A pair of responses gives two rows."""

    place: str  # FILE:LINE; empty for a record that does not come from a file
    prompt: Text
    response: Text | None  # None for data without responses
    columns: Mapping[str, Any]  # other columns that a reward or a stage can read


@dataclass(frozen=True)
class LeftOut:
    """The records that were skipped for one reason."""

    cause: str
    count: int
    places: tuple[str, ...]  # places of the first few records


@dataclass(frozen=True)
class Preview:
    """What a run would read from a data set, in summary."""

    name: str
    records: int  # usable records
    shape: str  # prompts, completions or pairs
    fields: Mapping[str, str]  # rlflow's name → the file's field
    unread: tuple[str, ...]  # fields of the file that are not used for any column
    wording: str  # a description of how prompts are presented to the model
    prompts: LengthSummary | None
    responses: LengthSummary | None
    left_out: tuple[LeftOut, ...]
    equal_pairs: str  # a line about pairs with two equal responses; empty if there are none
    rows: tuple[PreviewRow, ...]
    warnings: tuple[str, ...] = ()  # warnings about the model folder
    splits: str = ""  # a line about the splits of the data; empty if there is at most one

    def as_json(self) -> dict[str, Any]:
        """Return the preview as plain values."""
        return asdict(self)


def preview(data: Dataset, rows: int) -> Preview:
    """Return a preview of ``data``, which encodes each record once.

    ``rows``: how many records to show in full, from the first.
    """
    faults = {**data.faulty(range(len(data)))}
    usable = [index for index in range(len(data)) if index not in faults]
    prompts, responses = _lengths(data, usable)
    shown = tuple(_rows(data, usable[:rows]))
    return Preview(
        data.name,
        len(usable),
        data.shape,
        dict(data.fields),
        data.unread,
        _wording(data),
        _summary(prompts),
        _summary(responses),
        tuple(_left_out(data, [*data.faults, *faults.values()])),
        told(data, equal_pairs(data)),
        shown,
        tuple(_warnings(data)),
        splits=data.split_lines,
    )


def _warnings(data: Dataset) -> Iterator[str]:
    if isinstance(data.encoder, TokenizerEncoder):
        yield from map(str, [*data.encoder.ends.problems, *filter(None, [data.templated()])])


def _lengths(data: Dataset, index: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return (token counts of the prompts, token counts of the responses) for the records at ``index``."""
    prompts: list[int] = []
    responses: list[int] = []
    for start in range(0, len(index), STEP):
        batch = data.batch(index[start : start + STEP])
        each = 2 if data.shape == "pairs" else 1
        prompts += batch.data["prompt_tokens"].row_lengths.tolist()[::each]
        responses += batch.data["tokens"].row_lengths.tolist() if "tokens" in batch else []
    return prompts, responses


def _summary(lengths: Sequence[int]) -> LengthSummary | None:
    if not lengths:
        return None
    ordered = sorted(lengths)
    of_95 = ordered[-(-len(ordered) * 95 // 100) - 1]
    return LengthSummary(len(ordered), ordered[0], int(statistics.median_low(ordered)), of_95, ordered[-1])


def _wording(data: Dataset) -> str:
    if isinstance(data.encoder, ByteEncoder):
        return "as bytes, since the run has no model"
    return data.worded or "as plain text, without a chat template"


def _left_out(data: Dataset, faults: Sequence[Fault]) -> Iterator[LeftOut]:
    if data.dropped:
        yield LeftOut("longer than max_prompt", data.dropped, ())
    if data.doubles:
        yield LeftOut("a question that the task had already drawn", data.doubles, ())
    for alike in counted(faults).values():
        yield LeftOut(
            _cause(data, alike[0]),
            len(alike),
            tuple(str(fault.place) for fault in alike[:PLACES] if fault.place),
        )


def _cause(data: Dataset, fault: Fault) -> str:
    if fault.cause == "too_long":
        return f"too long; the model accepts {data.room}"
    return {"wording": "refused by the tokenizer or its chat template", "empty": "without a prompt"}.get(
        fault.cause, fault.cause
    )


def _rows(data: Dataset, index: Sequence[int]) -> Iterator[PreviewRow]:
    if not index:
        return
    batch, each = data.batch(index), 2 if data.shape == "pairs" else 1
    special = _special(data.encoder)
    prompts, responses = (
        _ids(batch, "prompt_tokens"),
        _ids(batch, "tokens") if "tokens" in batch else [None] * len(batch),
    )
    others = [
        name
        for name in batch.columns
        if name not in ("prompt", "prompt_tokens", "tokens", "mask", "completion", "finish", "group")
    ]
    values = {name: _values(batch[name]) for name in others}
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        place = data.records[index[row // each]].place
        asked, answered = (
            None if ids is None else _text(ids, data.encoder, special) for ids in (prompt, response)
        )
        assert asked is not None
        yield PreviewRow(
            str(place or ""), asked, answered, {name: column[row] for name, column in values.items()}
        )


def _ids(batch: Batch, column: str) -> list[Any]:
    return [tuple(ids) for ids in batch.data[column].lists()]


def _values(column: Any) -> list[Any]:
    return column if isinstance(column, list) else list(column.tolist())


def _special(encoder: Encoder) -> dict[int, str]:
    """Return the text of each special token, by id."""
    if not isinstance(encoder, TokenizerEncoder):
        return {END: "end"}
    return special_tokens(encoder.tokenizer)


def _text(ids: tuple[int, ...], encoder: Encoder, special: Mapping[int, str]) -> Text:
    return Text(
        _decoded(ids, encoder),
        ids,
        {place: special[number] for place, number in enumerate(ids) if number in special},
    )


def _decoded(ids: Sequence[int], encoder: Encoder) -> str:
    if isinstance(encoder, TokenizerEncoder):
        return str(encoder.tokenizer.decode(list(ids), skip_special_tokens=False))
    return bytes(number for number in ids if number != END).decode(errors="replace")
