"""Prompts: a cursor over a data set. Order and rows follow from seed, epoch and position alone, so that a run
resumes exactly."""

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

TOGETHER = 512  # records that ``check`` looks at in one step


class Prompts:
    """Serves the records of a data set without end: a new order in each epoch, a new position in the stream
    for each record. A record that cannot be used is passed over, and its position has no row. Whether it can
    be used follows from the data alone, so that a resumed cursor passes over the same records. Raises
    PlanError for an empty data set."""

    def __init__(self, data: Dataset, seed: int = 0) -> None:
        if not len(data):
            raise PlanError.of(
                "data-empty", f"{data.name} has no records to draw from", expected="one record or more"
            )
        self.data, self.seed, self.position = data, seed, 0
        self.faults: dict[int, Fault] = {}
        self._judged = bytearray(len(data))  # for each record whether it was looked at
        self._untold: deque[Fault] = deque()
        self._order: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self.data)

    @property
    def epoch(self) -> int:
        """How many times the data set was gone through."""
        return self.position // len(self)

    def take(self, count: int) -> Batch:
        """The next ``count`` records that can be used, as rows (two for a pair). Goes on into the next epoch
        where one ends. Raises PlanError where a whole epoch has no usable record."""
        pairs: list[tuple[int, int]] = []
        position, since = self.position, self.position
        while len(pairs) < count:
            ahead = [(place, self._record(place)) for place in range(position, position + count - len(pairs))]
            self._untold += self._judge([record for _, record in ahead])
            position += len(ahead)
            if usable := [pair for pair in ahead if pair[1] not in self.faults]:
                pairs, since = pairs + usable, position
            elif position - since >= 2 * len(self):  # as many as may stand between two draws of one record
                raise refused(self.data.name, list(self.faults.values()), len(self), self.data.room)
        self.position = position
        return self.data.batch([record for _, record in pairs], at=[place for place, _ in pairs])

    def check(self, seconds: float) -> int:
        """Look for unusable records, in the order of the data, for about so many seconds. Gives how many
        records were looked at so far; the unusable ones are in ``faults``."""
        limit = time.monotonic() + seconds
        for start in range(0, len(self), TOGETHER):
            if time.monotonic() > limit:
                break
            self._judge(range(start, min(start + TOGETHER, len(self))))
        return sum(self._judged)

    def untold(self) -> Iterator[Fault]:
        """The faults of records that were drawn since the last call, each once."""
        while self._untold:
            yield self._untold.popleft()

    def left_out(self, since: Mapping[str, Any]) -> dict[Figure, float]:
        """Metrics: how many records were passed over since a ``state``, by cause."""
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
        """The cursor's state, from which ``load`` goes on."""
        return {
            "epoch": self.epoch,
            "cursor": self.position % len(self),
            "seed": self.seed,
            "digest": self.data.digest,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a ``state``. Raises PlanError where the data or the seed differ from those of the
        state."""
        self._check_same(state)
        self.position = self._position(state)

    def _check_same(self, state: Mapping[str, Any]) -> None:
        now = self.state()
        for name in ("digest", "seed"):
            if state[name] != now[name]:
                raise PlanError.of(
                    "data-changed",
                    f"the {name} of {self.data.name} is not that of the saved run",
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

    def _judge(self, index: Iterable[int]) -> list[Fault]:
        """Look at those of the records that were not looked at yet. Gives their faults."""
        new = [record for record in dict.fromkeys(index) if not self._judged[record]]
        faults = self.data.faulty(new)
        self.faults |= faults
        for record in new:
            self._judged[record] = 1
        return list(faults.values())


def order(count: int, seed: int, epoch: int, *source: int) -> np.ndarray:
    """A shuffle of 0 … count-1, int64 [count]. It sorts raw bits, the one stream that numpy promises never to
    change. ``source``: a number of the source, where there are several."""
    bits = np.random.PCG64(np.random.SeedSequence([seed, epoch, *source])).random_raw(count)
    return np.argsort(bits, kind="stable")
