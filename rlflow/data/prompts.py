"""Serves the records of a data set as prompts, in a random order or drawn by weight.

The order depends only on seed, epoch and position, so a resumed run serves the same prompts. A draw by weight
depends only on seed, position and the weights.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from rlflow.author.figures import Figure, Of
from rlflow.author.seeds import derived
from rlflow.data.dataset import Dataset
from rlflow.data.faults import Fault, refused
from rlflow.errors import PlanError, SkipIteration

if TYPE_CHECKING:
    from rlflow.author.batch import Batch

TOGETHER = 512  # records that ``check`` checks in one step
AHEAD = 4  # how many times as many records as are drawn are put in order, because an iteration may draw more

Weigh = Callable[[np.ndarray], np.ndarray]  # numbers of records, int64 → their weights, float64


@dataclass
class WeightedDraw:
    """The records that an iteration draws by weight."""

    iteration: int
    weights: np.ndarray  # float64 [records]
    seed: int
    position: int  # in the data stream, where the draw began
    records: list[int] = field(
        default_factory=list
    )  # indices in the order of the draw, as far as it is known
    drawn: int = 0  # how many of them were drawn

    def next(self, count: int) -> list[int]:
        """Draw up to ``count`` more records, and return their indices."""
        end = self.drawn + count
        if len(self.records) < end:
            self.records = by_weight(self.weights, self.seed, self.position, AHEAD * end).tolist()
        records = self.records[self.drawn : end]
        self.drawn += len(records)
        return records


class Prompts:
    """Serves the records of a data set endlessly, each epoch in a new order.

    A record gets a new position in the data stream each time it's drawn. Unusable records are skipped, and
    their positions stay empty. Whether a record is usable depends only on the data, so a resumed cursor skips
    the same ones. Raises PlanError for an empty data set.
    """

    def __init__(self, data: Dataset, seed: int = 0) -> None:
        if not len(data):
            raise PlanError.of(
                "data-empty",
                f"{data.name} has no records to draw from",
                expected="one record or more",
                remedy="write records to it, or use other data",
            )
        self.data, self.seed, self.position = data, seed, 0
        self.faults: dict[int, Fault] = {}
        self._checked = bytearray(len(data))  # 1 for each record that was checked
        self._unreported: deque[Fault] = deque()
        self._skipped: dict[int, Fault] = {}  # empty position → the record that was skipped there
        self._order: tuple[int, np.ndarray] | None = None
        self._draw: WeightedDraw | None = None
        self._short: str | None = None  # message about the first draw of too few records; empty once reported

    def __len__(self) -> int:
        return len(self.data)

    @property
    def epoch(self) -> int:
        """The number of epochs served completely."""
        return self.position // len(self)

    def take(self, count: int) -> Batch:
        """Return the next ``count`` usable records as rows, starting a new epoch if necessary.

        A preference pair becomes two rows. Raises PlanError if no record is usable.
        """
        pairs: list[tuple[int, int]] = []
        position, since = self.position, self.position
        while len(pairs) < count:
            ahead = [(place, self._record(place)) for place in range(position, position + count - len(pairs))]
            position += len(ahead)
            if usable := self._usable_of(ahead):
                pairs, since = pairs + usable, position
            elif position - since >= 2 * len(self):  # the maximum distance between two draws of a record
                raise refused(self.data.name, list(self.faults.values()), len(self), self.data.room)
        self.position = position
        return self._rows(pairs)

    def draw(self, count: int, iteration: int, weigh: Weigh, by: str) -> Batch:
        """Return up to ``count`` usable records as rows, drawn by weight from all records.

        No record is drawn twice in an iteration: later calls with the same ``iteration`` draw from the records
        that are left, and there may be none. ``weigh``: returns the weights, given the records' numbers
        (``prompt_id``); called once per iteration. A record whose weight is 0 or NaN is never drawn. ``by``: the
        name of the weights, for messages. Raises SkipIteration if an iteration can't draw any record.
        """
        first = self._draw is None or self._draw.iteration != iteration
        if not count:
            return self._rows([])
        if self._draw is None or first:
            self._draw = WeightedDraw(iteration, weigh(self._numbers), self.seed, self.position)
        pairs: list[tuple[int, int]] = []
        position = self.position
        while len(pairs) < count and (records := self._draw.next(count - len(pairs))):
            pairs += self._usable_of(list(enumerate(records, position)))
            position += len(records)
        if first and not pairs:
            raise self._nothing(by)
        if first and len(pairs) < count and self._short is None:
            self._short = (
                f"an iteration takes {count} prompts, but only {len(pairs)} usable records have a weight above 0 "
                f"(--prompts-by {by}); further short iterations are not reported"
            )
        self.position = position
        return self._rows(pairs)

    @cached_property
    def _numbers(self) -> np.ndarray:
        """The number of each record (``prompt_id``), int64 [records]."""
        return np.array([record.number for record in self.data.records], dtype=np.int64)

    def _nothing(self, by: str) -> Exception:
        """Return the error to raise if no record can be drawn by weight."""
        assert self._draw is not None
        if len(self.faults) == len(self):
            return refused(self.data.name, list(self.faults.values()), len(self), self.data.room)
        usable = " that can be used" if self._draw.records else ""
        return SkipIteration(f"no record{usable} has a weight above 0 (--prompts-by {by})")

    def _rows(self, pairs: list[tuple[int, int]]) -> Batch:
        """Return records as rows. ``pairs``: the position and the index of each."""
        return self.data.batch([record for _, record in pairs], at=[place for place, _ in pairs])

    def check(self, seconds: float) -> int:
        """Check records for faults, in file order, for about ``seconds``.

        Returns how many records have been checked so far, including earlier calls. ``faults`` has the faults
        found.
        """
        limit = time.monotonic() + seconds
        for start in range(0, len(self), TOGETHER):
            if time.monotonic() > limit:
                break
            self._check_records(range(start, min(start + TOGETHER, len(self))))
        return sum(self._checked)

    def untold(self) -> Iterator[Fault]:
        """Yield the faults found in drawn records since the last call."""
        while self._unreported:
            yield self._unreported.popleft()

    def short(self) -> str:
        """Return a message if an iteration has drawn too few records, else "". Only the first is reported."""
        if message := self._short or "":
            self._short = ""
        return message

    def left_out(self, since: Mapping[str, Any]) -> dict[Figure, float]:
        """Return metrics of the number of records skipped since the earlier state ``since``, by cause."""
        if not self._skipped:
            return {}
        places = range(self._position(since), self.position)
        causes = Counter(fault.cause for place in places if (fault := self._skipped.get(place)))
        return {Figure(Of.LEFT_OUT, cause): float(count) for cause, count in sorted(causes.items())}

    def state(self) -> dict[str, Any]:
        """Return the cursor's state, which ``load`` takes."""
        return {
            "epoch": self.epoch,
            "cursor": self.position % len(self),
            "seed": self.seed,
            "digest": self.data.digest,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from what ``state`` returned.

        Raises PlanError if the state belongs to different data or a different seed.
        """
        self._check_same(state)
        self.position = self._position(state)
        self._draw = None
        self._skipped.clear()

    def _check_same(self, state: Mapping[str, Any]) -> None:
        now = self.state()
        for name in ("digest", "seed"):
            if state[name] != now[name]:
                raise PlanError.of(
                    "data-changed",
                    f"the {name} of {self.data.name} differs from the one in the saved run",
                    found=str(now[name]),
                    expected=str(state[name]),
                    remedy="resume with the same data and seed",
                )

    def _position(self, state: Mapping[str, Any]) -> int:
        return int(state["epoch"]) * len(self) + int(state["cursor"])

    def _record(self, position: int) -> int:
        epoch, place = divmod(position, len(self))
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, order(len(self), self.seed, epoch))
        return int(self._order[1][place])

    def _usable_of(self, pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the usable records among ``pairs``, each with its position, and remember the others."""
        self._unreported += self._check_records([record for _, record in pairs])
        for place, record in pairs:
            self._skipped.pop(place, None)  # of an iteration that could not draw any record
            if record in self.faults:
                self._skipped[place] = self.faults[record]
        return [pair for pair in pairs if pair[1] not in self.faults]

    def _check_records(self, index: Iterable[int]) -> list[Fault]:
        """Check those of the records at ``index`` that haven't been checked yet, and return their faults."""
        new = [record for record in dict.fromkeys(index) if not self._checked[record]]
        faults = self.data.faulty(new)
        self.faults |= faults
        for record in new:
            self._checked[record] = 1
        return list(faults.values())


def order(count: int, seed: int, epoch: int, *source: int) -> np.ndarray:
    """Return 0 … count-1 in random order, int64 [count].

    Raw random bits are sorted, because numpy guarantees that this stream never changes. ``source``: the
    number of the data source, if there are several.
    """
    bits = np.random.PCG64(np.random.SeedSequence([seed, epoch, *source])).random_raw(count)
    return np.argsort(bits, kind="stable")


def by_weight(weights: np.ndarray, seed: int, position: int, count: int | None = None) -> np.ndarray:
    """Return the indices with a weight above 0, int64, in the order of a draw without replacement.

    ``count``: how many of them are needed; None: all. There may be a few more.

    Each index waits for an exponential time whose rate is its weight (Efraimidis and Spirakis, "Weighted random
    sampling with a reservoir", 2006), so the first of those that are left is always drawn in proportion to the
    weights. ``weights``: float64 [records], 0 or more, or NaN. ``position``: the position in the data stream where
    the draw begins.
    """
    bits = np.random.PCG64(derived(seed, "draw", position)).random_raw(len(weights))
    index = np.flatnonzero(weights > 0)
    uniform = ((bits[index] >> np.uint64(11)) + 0.5) * 2.0**-53
    with np.errstate(over="ignore"):  # the smallest weights may wait forever
        waits = -np.log(uniform) / weights[index]
    if count is not None and count < len(index):
        near = waits <= np.partition(waits, count)[count]
        index, waits = index[near], waits[near]
    return index[np.argsort(waits, kind="stable")]
