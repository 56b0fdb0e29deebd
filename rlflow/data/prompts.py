"""Prompts: a cursor over a data set. Its order and its rows follow from seed, epoch and position alone, so it resumes exactly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from rlflow.data.dataset import Dataset
from rlflow.errors import PlanError

if TYPE_CHECKING:
    from rlflow.batch import Batch


class Prompts:
    """Serves the records of a data set without end: a new order in each epoch, a new position for each row of the stream."""

    def __init__(self, data: Dataset, seed: int = 0) -> None:
        if not len(data):
            raise PlanError.of("data-empty", f"{data.name} has no records to draw from", expected="one record or more")
        self.data, self.seed, self.position = data, seed, 0
        self._order: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self.data)

    @property
    def epoch(self) -> int:
        return self.position // len(self)

    def take(self, count: int) -> Batch:
        """The next ``count`` records (of pairs: 2 × ``count`` rows), going on into the next epoch where one ends."""
        index = [self._record(position) for position in range(self.position, self.position + count)]
        batch = self.data.batch(index, self.position)
        self.position += count
        return batch

    def state(self) -> dict[str, int | str]:
        """What ``load`` needs to go on from here."""
        return {"epoch": self.epoch, "cursor": self.position % len(self), "seed": self.seed, "digest": self.data.digest}

    def load(self, state: Mapping[str, int | str]) -> None:
        """Go on from a ``state``. Raises PlanError where the data or the seed is another."""
        now = self.state()
        for name in ("digest", "seed"):
            if state[name] != now[name]:
                raise PlanError.of("data-changed", f"the {name} of {self.data.name} is not that of the saved run", found=str(now[name]),
                                   expected=str(state[name]), remedy="resume with the same data and seed")
        self.position = int(state["epoch"]) * len(self) + int(state["cursor"])

    def _record(self, position: int) -> int:
        epoch, place = divmod(position, len(self))
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, _order(len(self), self.seed, epoch))
        return int(self._order[1][place])


def _order(count: int, seed: int, epoch: int) -> np.ndarray:
    """A shuffle of 0 … count-1. Raw bits are the one stream that numpy promises never to change."""
    bits = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(count)
    return np.argsort(bits, kind="stable")
