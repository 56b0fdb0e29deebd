"""Serves the records of a data set as prompts.

The order depends only on seed, epoch and position, so a resumed run serves the same prompts.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from rlflow.author.figures import Figure, Of
from rlflow.data.dataset import Dataset
from rlflow.data.faults import Fault, refused
from rlflow.errors import PlanError

if TYPE_CHECKING:
    from rlflow.author.batch import Batch

TOGETHER = 512  # records that ``check`` checks in one step


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
        self._order: tuple[int, np.ndarray] | None = None

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
            self._unreported += self._check_records([record for _, record in ahead])
            position += len(ahead)
            if usable := [pair for pair in ahead if pair[1] not in self.faults]:
                pairs, since = pairs + usable, position
            elif position - since >= 2 * len(self):  # the maximum distance between two draws of a record
                raise refused(self.data.name, list(self.faults.values()), len(self), self.data.room)
        self.position = position
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

    def left_out(self, since: Mapping[str, Any]) -> dict[Figure, float]:
        """Return metrics of the number of records skipped since the earlier state ``since``, by cause."""
        if not self.faults:
            return {}
        first = self._position(since)
        causes = Counter(
            fault.cause
            for place in range(first, self.position)
            if (fault := self.faults.get(self._record(place)))
        )
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
