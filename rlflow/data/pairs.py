"""Finds preference pairs whose two responses have the same tokens, so a model can't learn from them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence

from rlflow.data.dataset import Dataset
from rlflow.data.faults import places_of
from rlflow.data.fields import Record, Response
from rlflow.data.turns import answered, joined
from rlflow.errors import PlanError

TOGETHER = 256  # pairs that are encoded at once


def equal_pairs(data: Dataset, seconds: float = math.inf) -> list[Record]:
    """Return the preference pairs whose two responses have the same token ids.

    Pairs that haven't been encoded within about ``seconds`` are found only if their responses are equal as
    text.
    """
    limit = time.monotonic() + seconds
    return [
        record
        for start in range(0, len(data) if data.shape == "pairs" else 0, TOGETHER)
        for record in _equal(data, data.records[start : start + TOGETHER], time.monotonic() > limit)
    ]


def _equal(data: Dataset, records: Sequence[Record], hasty: bool) -> Iterator[Record]:
    same = {number for number, record in enumerate(records) if record.responses[0] == record.responses[1]}
    others = [] if hasty else [number for number in range(len(records)) if number not in same]
    ids = _ids(
        data, [(records[number], response) for number in others for response in records[number].responses]
    )
    same |= {
        number
        for place, number in enumerate(others)
        if ids[2 * place] is not None and ids[2 * place] == ids[2 * place + 1]
    }
    yield from (records[number] for number in sorted(same))


def _ids(data: Dataset, responses: Sequence[tuple[Record, Response]]) -> list[list[int] | None]:
    """Return the ids of each response, or None if it can't be encoded, which other checks report."""
    try:
        turns = answered(
            data.encoder, [(data.wording.of(record), response) for record, response in responses]
        )
        return [joined(each)[0] for each in turns]
    except PlanError:
        return (
            [None] * len(responses)
            if len(responses) == 1
            else [ids for each in responses for ids in _ids(data, [each])]
        )


def told(data: Dataset, equal: Sequence[Record]) -> str:
    """Return a line that reports pairs with equal responses, or an empty string if there are none."""
    where = places_of([record.place for record in equal])
    return (
        f"{len(equal)} of {len(data)} pairs have the same ids in both responses and teach nothing{where}"
        if equal
        else ""
    )


def check_pairs(data: Dataset, equal: Sequence[Record]) -> None:
    """Raise PlanError if all pairs in the data have equal responses.

    ``equal``: the pairs that do.
    """
    if equal and len(equal) == len(data):
        fields = " and ".join(f"'{data.fields.get(name, name)}'" for name in ("chosen", "rejected"))
        raise PlanError.of(
            "data-pairs",
            f"all {len(data)} pairs of {data.name} have the same ids in both responses",
            place=equal[0].place,
            found=f"equal responses in {fields}",
            expected="two different responses, one of them preferred",
            remedy="map the fields that differ: --data.chosen FIELD --data.rejected FIELD",
        )
