"""Which rank takes which load: multiprocessor scheduling of whole units, P||Cmax, so that the fullest rank is
as light as can be.

Longest first (Graham 1969, at most 4/3 of the best), then exchanges between the fullest rank and another
until none helps, then, where a lower bound does not show that to be near enough, a search by capacities with
a budget.
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
    """The rank of each unit, by their sizes (0 or more). Deterministic; ties go by the order of units and
    ranks."""
    ranks_of = _longest_first(sizes, ranks)
    bound = lower_bound(sizes, ranks)
    if _largest(sizes, ranks_of, ranks) > CLOSE * bound:
        _exchange(sizes, ranks_of, ranks, bound)
    if len(sizes) <= SEARCHED and _largest(sizes, ranks_of, ranks) > NEAR * bound:
        ranks_of = _searched(sizes, ranks_of, ranks, bound)
    return ranks_of


def lower_bound(sizes: Sequence[int], ranks: int) -> int:
    """The least that the fullest rank can hold. It is at least the mean. And since of any k·ranks + 1 units
    some k + 1 share a rank, it is at least the sum of the k + 1 smallest of the k·ranks + 1 largest units,
    for each k; for k = 0 this is the largest unit."""
    ordered = sorted(sizes, reverse=True)
    shared = (sum(ordered[count - count // ranks : count + 1]) for count in range(0, len(ordered), ranks))
    return max(-(-sum(ordered) // ranks), *shared, 0)


def _largest(sizes: Sequence[int], ranks_of: Sequence[int], ranks: int) -> int:
    return max(_sums(sizes, ranks_of, ranks))


def _sums(sizes: Sequence[int], ranks_of: Sequence[int], ranks: int) -> list[int]:
    sums = [0] * ranks
    for size, rank in zip(sizes, ranks_of, strict=True):
        sums[rank] += size
    return sums


def _longest_first(sizes: Sequence[int], ranks: int) -> list[int]:
    """Each unit to the lightest rank, the longest first; of equally light ranks the one with fewest units."""
    ranks_of = [0] * len(sizes)
    lightest = [(0, 0, rank) for rank in range(ranks)]
    for unit in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        load, units, rank = lightest[0]
        ranks_of[unit] = rank
        heapq.heapreplace(lightest, (load + sizes[unit], units + 1, rank))
    return ranks_of


def _exchange(sizes: Sequence[int], ranks_of: list[int], ranks: int, bound: int) -> None:
    """Move a unit from the fullest rank, or swap it with a smaller one of another, whichever leaves the two
    most even."""
    # an empty unit at each rank's end: swapping with it is moving
    size = torch.tensor([*sizes, *[0] * ranks])
    rank = torch.tensor([*ranks_of, *range(ranks)])
    for _ in range(EXCHANGES):
        load = torch.zeros(ranks, dtype=torch.int64).index_add_(0, rank, size)
        fullest = int(load.argmax())
        if int(load[fullest]) <= CLOSE * bound:
            break
        on_fullest, on_others = (
            (rank[: len(sizes)] == fullest).nonzero()[:, 0],
            (rank != fullest).nonzero()[:, 0],
        )
        shift = size[on_fullest][:, None] - size[on_others]
        after = torch.maximum(load[fullest] - shift, load[rank[on_others]] + shift)
        best = int(after.argmin()) if after.numel() else 0
        if not after.numel() or int(after.view(-1)[best]) >= int(load[fullest]):
            break
        a, b = int(on_fullest[best // len(on_others)]), int(on_others[best % len(on_others)])
        rank[a] = rank[b]
        rank[b] = fullest if b < len(sizes) else rank[b]
    ranks_of[:] = rank[: len(sizes)].tolist()


def _searched(sizes: Sequence[int], ranks_of: list[int], ranks: int, bound: int) -> list[int]:
    """Halve the gap between the bound and what is found until it is near enough. A capacity whose budget is
    spent counts as too small."""
    largest = _largest(sizes, ranks_of, ranks)
    while bound < largest and largest > NEAR * bound:
        capacity = (bound + largest) // 2
        exact = _Search(sizes, ranks, capacity).run()
        if exact is None:
            bound = capacity + 1
        else:
            ranks_of, largest = exact, _largest(sizes, exact, ranks)
    return ranks_of


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
        ranks_of = [0] * len(self.order)
        for unit, rank in zip(self.order, self.ranks, strict=True):
            ranks_of[unit] = rank
        return ranks_of

    def _place(self, place: int) -> bool:
        if place == len(self.sizes):
            return True
        self.nodes -= 1
        state = (place, *sorted(self.free))
        if (
            self.nodes < 0
            or state in self.failed
            or sum(free for free in self.free if free >= self.smallest) < self.rest[place]
        ):
            return False
        if any(self._on(place, rank) for rank in self._candidates(self.sizes[place])):
            return True
        self.failed.add(state)
        return False

    def _on(self, place: int, rank: int) -> bool:
        self.free[rank] -= self.sizes[place]
        self.ranks[place] = rank
        solution = self._place(place + 1)
        self.free[rank] += self.sizes[place]
        return solution

    def _candidates(self, size: int) -> list[int]:
        """One rank of each amount of room that is enough, the fullest first."""
        rooms = {room: rank for rank, room in reversed(list(enumerate(self.free))) if room >= size}
        return [rooms[room] for room in sorted(rooms)]
