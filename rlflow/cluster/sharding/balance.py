"""Which rank takes which load: multiprocessor scheduling of whole units, P||Cmax, so that the fullest rank is as light as can be.

Longest first (Graham 1969, at most 4/3 of the best), then exchanges between the fullest rank and another until none helps, then, where a
lower bound does not show that to be near enough, a search by capacities with a budget.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch

NEAR = 1.05  # of the best: what is promised
CLOSE = 1.01  # of the lower bound: where exchanging ends
EXCHANGES = 200
NODES = 4_000  # of the search, for each capacity that is tried
SEARCHED = 128  # units at most: more are even without a search


def assigned(sizes: Sequence[int], ranks: int) -> list[int]:
    """The rank of each unit, by their sizes (0 or more). Deterministic; ties go by the order of units and ranks."""
    given = _longest_first(sizes, ranks)
    bound = lower_bound(sizes, ranks)
    if _largest(sizes, given, ranks) > CLOSE * bound:
        _exchange(sizes, given, ranks, bound)
    if len(sizes) <= SEARCHED and _largest(sizes, given, ranks) > NEAR * bound:
        given = _searched(sizes, given, ranks, bound)
    return given


def lower_bound(sizes: Sequence[int], ranks: int) -> int:
    """What the fullest rank holds at least: the mean; and for each k, since of k·ranks + 1 units some k + 1 share a rank, the k + 1
    smallest of the k·ranks + 1 largest. k = 0 is the longest unit."""
    ordered = sorted(sizes, reverse=True)
    shared = (sum(ordered[count - count // ranks : count + 1]) for count in range(0, len(ordered), ranks))
    return max(-(-sum(ordered) // ranks), *shared, 0)


def _largest(sizes: Sequence[int], given: Sequence[int], ranks: int) -> int:
    return max(_sums(sizes, given, ranks))


def _sums(sizes: Sequence[int], given: Sequence[int], ranks: int) -> list[int]:
    sums = [0] * ranks
    for size, rank in zip(sizes, given, strict=True):
        sums[rank] += size
    return sums


def _longest_first(sizes: Sequence[int], ranks: int) -> list[int]:
    """Each unit to the lightest rank, the longest first; of equally light ranks the one with fewest units."""
    given = [0] * len(sizes)
    lightest = [(0, 0, rank) for rank in range(ranks)]
    for unit in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        load, units, rank = lightest[0]
        given[unit] = rank
        heapq.heapreplace(lightest, (load + sizes[unit], units + 1, rank))
    return given


def _exchange(sizes: Sequence[int], given: list[int], ranks: int, bound: int) -> None:
    """Move a unit from the fullest rank, or swap it with a smaller one of another, whichever leaves the two most even."""
    size = torch.tensor([*sizes, *[0] * ranks])  # an empty unit at each rank's end: swapping with it is moving
    rank = torch.tensor([*given, *range(ranks)])
    for _ in range(EXCHANGES):
        load = torch.zeros(ranks, dtype=torch.int64).index_add_(0, rank, size)
        fullest = int(load.argmax())
        if int(load[fullest]) <= CLOSE * bound:
            break
        mine, theirs = (rank[: len(sizes)] == fullest).nonzero()[:, 0], (rank != fullest).nonzero()[:, 0]
        shift = size[mine][:, None] - size[theirs]
        after = torch.maximum(load[fullest] - shift, load[rank[theirs]] + shift)
        best = int(after.argmin()) if after.numel() else 0
        if not after.numel() or int(after.view(-1)[best]) >= int(load[fullest]):
            break
        a, b = int(mine[best // len(theirs)]), int(theirs[best % len(theirs)])
        rank[a] = rank[b]
        rank[b] = fullest if b < len(sizes) else rank[b]
    given[:] = rank[: len(sizes)].tolist()


def _searched(sizes: Sequence[int], given: list[int], ranks: int, bound: int) -> list[int]:
    """Halve the gap between the bound and what is found until it is near enough. A capacity whose budget is spent counts as too small."""
    largest = _largest(sizes, given, ranks)
    while bound < largest and largest > NEAR * bound:
        capacity = (bound + largest) // 2
        found = _Search(sizes, ranks, capacity).run()
        if found is None:
            bound = capacity + 1
        else:
            given, largest = found, _largest(sizes, found, ranks)
    return given


class _Search:
    """Depth first: each unit, the longest first, to each rank where it fits, the fullest first."""

    def __init__(self, sizes: Sequence[int], ranks: int, capacity: int) -> None:
        self.order = sorted(range(len(sizes)), key=lambda i: -sizes[i])
        self.sizes = [sizes[i] for i in self.order]
        self.rest = [sum(self.sizes[place:]) for place in range(len(sizes) + 1)]
        self.smallest = min((size for size in sizes if size), default=0)
        self.free, self.ranks, self.nodes = [capacity] * ranks, [0] * len(sizes), NODES
        self.failed: set[tuple[int, ...]] = set()

    def run(self) -> list[int] | None:
        """The rank of each unit, or None where there is none or the budget is spent."""
        if not self._place(0):
            return None
        given = [0] * len(self.order)
        for unit, rank in zip(self.order, self.ranks, strict=True):
            given[unit] = rank
        return given

    def _place(self, place: int) -> bool:
        if place == len(self.sizes):
            return True
        self.nodes -= 1
        state = (place, *sorted(self.free))
        if self.nodes < 0 or state in self.failed or sum(free for free in self.free if free >= self.smallest) < self.rest[place]:
            return False
        if any(self._on(place, rank) for rank in self._candidates(self.sizes[place])):
            return True
        self.failed.add(state)
        return False

    def _on(self, place: int, rank: int) -> bool:
        self.free[rank] -= self.sizes[place]
        self.ranks[place] = rank
        found = self._place(place + 1)
        self.free[rank] += self.sizes[place]
        return found

    def _candidates(self, size: int) -> list[int]:
        """One rank of each amount of room that is enough, the fullest first."""
        rooms = {room: rank for rank, room in reversed(list(enumerate(self.free))) if room >= size}
        return [rooms[room] for room in sorted(rooms)]
