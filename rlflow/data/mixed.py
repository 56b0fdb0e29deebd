"""Combines data sources into one data set, and serves their records in proportion to their weights."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from rlflow.author.columns import SOURCE, Kind, text
from rlflow.author.figures import Figure, Of
from rlflow.data.dataset import Dataset
from rlflow.data.faults import refused
from rlflow.data.json_fields import ABSENT
from rlflow.data.prompts import Prompts, order
from rlflow.data.shares import turns
from rlflow.data.stored import stored
from rlflow.errors import PlanError

if TYPE_CHECKING:
    from rlflow.author.batch import Batch


def mixed(parts: Mapping[str, Dataset], weights: Mapping[str, Fraction] | None = None) -> Dataset:
    """Combine data sets, given by source name, into one whose column SOURCE names each row's source.

    If a source lacks a text column, its rows have an empty value there. ``weights``: each source's share of
    the prompts, in any unit; by default, its number of records. Raises PlanError if the sources can't be
    combined.
    """
    first = next(iter(parts.values()))
    declared = {name: kind for part in parts.values() for name, kind in part.declared.items()} | {
        SOURCE: text
    }
    _same_shape(parts)
    _same_kinds(parts, declared)
    absent = dict.fromkeys((name for name, kind in declared.items() if kind == text), ABSENT)
    records, test = (
        stored(
            replace(record, more={**absent, **record.more, SOURCE: name})
            for name, own in each.items()
            for record in own
        )
        for each in (
            {name: part.records for name, part in parts.items()},
            {name: part.test for name, part in parts.items()},
        )
    )
    shares = dict(weights) if weights else {name: Fraction(len(part)) for name, part in parts.items()}
    return Dataset(
        ", ".join(parts),
        records,
        first.encoder,
        first.wording,
        declared,
        fields={column: field for part in parts.values() for column, field in part.fields.items()},
        dropped=sum(part.dropped for part in parts.values()),
        doubles=sum(part.doubles for part in parts.values()),
        faults=tuple(fault for part in parts.values() for fault in part.faults),
        room=first.room,
        alone=sum(part.alone for part in parts.values()),
        unread=tuple(name for part in parts.values() for name in part.unread),
        parts=dict(parts),
        weights=shares,
        test=test,
        model_prompt=any(part.model_prompt for part in parts.values()),
    )


def _same_shape(parts: Mapping[str, Dataset]) -> None:
    for name, part in parts.items():
        if not len(part):
            raise PlanError.of(
                "data-empty",
                f"the source '{name}' has no records",
                found=part.name,
                expected="one record or more",
                remedy="write records to it, or leave the source out",
            )
    shapes = {name: part.shape for name, part in parts.items()}
    if len(set(shapes.values())) > 1:
        raise PlanError.of(
            "source-shape",
            "the sources of data are of different shapes",
            found=", ".join(f"{name}: {shape}" for name, shape in shapes.items()),
            expected="prompts alone, prompts with completions, or pairs in all of them",
            remedy="map the fields of a source: --data.NAME.completion FIELD",
        )


def _same_kinds(parts: Mapping[str, Dataset], declared: Mapping[str, Kind]) -> None:
    """Raise PlanError if a source lacks a declared number column: only text columns can be left empty."""
    for name, part in parts.items():
        for column, kind in declared.items():
            if column not in part.declared and kind != text:
                raise PlanError.of(
                    "source-field",
                    f"the source '{name}' has no '{column}'",
                    found=part.name,
                    expected=f"a field for the column '{column}' of kind {kind} in every source",
                    remedy=f"--data.{name}.{column} FIELD",
                )


def prompts_of(data: Dataset, seed: int = 0) -> Prompts:
    """Return a cursor that serves the data set's records endlessly, from one or several sources.

    ``seed`` determines the order of each epoch.
    """
    return MixedPrompts(data, seed) if data.parts else Prompts(data, seed)


class MixedPrompts(Prompts):
    """Serves the records of several sources endlessly.

    Which source is next depends only on the weights (``shares.turns``). Each source counts its own epochs,
    and each of its epochs has a new order. If a record is unusable, its source serves the next one instead,
    so the weights apply to usable records. A row's position in the data stream is the number of rows served
    before it.
    """

    def __init__(self, data: Dataset, seed: int = 0) -> None:
        super().__init__(data, seed)
        self._names = tuple(data.parts)
        self._weights = [data.weights[name] for name in self._names]
        self._counts = [0] * len(self._names)  # turns served from each source at these weights
        self._cursors = [0] * len(self._names)  # place of each source's cursor, counted over all its epochs
        by_name: dict[str, list[int]] = {name: [] for name in self._names}
        for index, record in enumerate(data.records):
            by_name[record.more[SOURCE]].append(index)
        self._records = list(by_name.values())
        self._orders: dict[int, tuple[int, Any]] = {}
        for name, records in by_name.items():
            if not records:
                raise PlanError.of(
                    "data-empty",
                    f"the source '{name}' has no records left to train on",
                    found="all of its records are held out",
                    expected="one record or more",
                    remedy="a smaller --held-out, or more records",
                )

    @property
    def epoch(self) -> int:
        """How many epochs are complete in the source that has completed the fewest."""
        return min(
            cursor // len(records) for cursor, records in zip(self._cursors, self._records, strict=True)
        )

    def take(self, count: int) -> Batch:
        """Return the next ``count`` usable records as rows. A preference pair becomes two rows.

        Raises PlanError if a source has no usable record.
        """
        sources = list(itertools.islice(turns(self._weights, self._counts), count))
        usable = {source: self._usable(source, number) for source, number in Counter(sources).items()}
        for source, (cursor, records) in usable.items():
            self._cursors[source] = cursor
            self._counts[source] += len(records)
        waiting = {source: iter(records) for source, (_, records) in usable.items()}
        batch = self.data.batch([next(waiting[source]) for source in sources], start=self.position)
        self.position += count
        return batch

    def _usable(self, source: int, count: int) -> tuple[int, list[int]]:
        """Return (new cursor of the source, indices of its next ``count`` usable records)."""
        cursor = since = self._cursors[source]
        records: list[int] = []
        while len(records) < count:
            ahead = [self._at(source, place) for place in range(cursor, cursor + count - len(records))]
            self._unreported += self._check_records(ahead)
            cursor += len(ahead)
            if usable := [record for record in ahead if record not in self.faults]:
                records, since = records + usable, cursor
            # The maximum distance between two draws of one record.
            elif cursor - since >= 2 * len(self._records[source]):
                own = [self.faults[record] for record in self._records[source] if record in self.faults]
                raise refused(self._names[source], own, len(own), self.data.room)
        return cursor, records

    def _at(self, source: int, place: int) -> int:
        """Return the index of the record that a source serves at ``place``, counted across its epochs."""
        own = self._records[source]
        epoch, within = divmod(place, len(own))
        if self._orders.get(source, (-1, None))[0] != epoch:
            self._orders[source] = (epoch, order(len(own), self.seed, epoch, _number(self._names[source])))
        return own[int(self._orders[source][1][within])]

    def left_out(self, since: Mapping[str, Any]) -> dict[Figure, float]:
        """Return metrics of the number of records skipped since the earlier state ``since``, by cause."""
        if not self.faults:
            return {}
        causes: Counter[str] = Counter()
        for source, first in enumerate(self._places(since)):
            passed = (
                self.faults.get(self._at(source, place)) for place in range(first, self._cursors[source])
            )
            causes.update(fault.cause for fault in passed if fault)
        return {Figure(Of.LEFT_OUT, cause): float(count) for cause, count in sorted(causes.items())}

    def state(self) -> dict[str, Any]:
        """Return the state of all cursors, which ``load`` takes."""
        each = {
            name: {"epoch": cursor // len(records), "cursor": cursor % len(records), "turns": count}
            for name, cursor, records, count in zip(
                self._names, self._cursors, self._records, self._counts, strict=True
            )
        }
        return {
            "position": self.position,
            "sources": each,
            "weights": [str(weight) for weight in self._weights],
            "seed": self.seed,
            "digest": self.data.digest,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from what ``state`` returned.

        If the weights have changed, the balance between sources starts over. Raises PlanError if the state
        belongs to different data or a different seed.
        """
        self._check_same(state)
        self.position, self._cursors = int(state["position"]), self._places(state)
        same = state["weights"] == [str(weight) for weight in self._weights]
        self._counts = [int(state["sources"][name]["turns"]) if same else 0 for name in self._names]

    def _places(self, state: Mapping[str, Any]) -> list[int]:
        return [
            int(state["sources"][name]["epoch"]) * len(records) + int(state["sources"][name]["cursor"])
            for name, records in zip(self._names, self._records, strict=True)
        ]


def _number(name: str) -> int:
    """Return a number that depends only on a source's name.

    Used as a seed, it gives each source random orders of its own.
    """
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4])


def fifths(data: Dataset, held_out: int) -> dict[str, int]:
    """Return how many questions to hold out from each source, by name.

    This is the source's share of ``held_out`` by weight, but at least 1 and at most a fifth of its questions,
    or all questions of its split "test". A source with fewer than 5 questions holds out none.
    """
    total = sum(data.weights.values())
    questions: dict[str, set[int]] = {name: set() for name in data.parts}
    for record in data.records:
        questions[record.more[SOURCE]].add(hash(record.question))
    most = {name: len(own) // 5 for name, own in questions.items()}
    most |= Counter(record.more[SOURCE] for record in data.test)
    return {
        name: min(max(round(held_out * data.weights[name] / total), 1), limit) for name, limit in most.items()
    }
