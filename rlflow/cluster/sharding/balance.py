"""Balance loads over ranks: multiprocessor scheduling of indivisible units (P||Cmax).

The aim is to make the load of the fullest rank as small as possible. First, units are assigned to the
lightest rank, largest unit first (Graham 1969, at most 4/3 of the best load). Then the fullest rank exchanges
units with other ranks until no exchange helps. If the result still isn't close to a lower bound, a search
with a limited budget follows.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch

NEAR = 1.05  # the target: at most 1.05 times the best
CLOSE = 1.01  # exchanging stops at this multiple of the lower bound
EXCHANGES = 200
NODES = 4_000  # maximum search nodes for each capacity that is tried
SEARCHED = 128  # maximum units for a search; more units are balanced without it


def assigned(sizes: Sequence[int], ranks: int) -> list[int]:
    """Return the rank of each unit. ``sizes``: the size of each unit, 0 or more.

    The result is deterministic, because ties are resolved by the order of the units and ranks.
    """
    ranks_of = _longest_first(sizes, ranks)
    bound = lower_bound(sizes, ranks)
    if _largest(sizes, ranks_of, ranks) > CLOSE * bound:
        _exchange(sizes, ranks_of, ranks, bound)
    if len(sizes) <= SEARCHED and _largest(sizes, ranks_of, ranks) > NEAR * bound:
        ranks_of = _searched(sizes, ranks_of, ranks, bound)
    return ranks_of


def lower_bound(sizes: Sequence[int], ranks: int) -> int:
    """Return a lower bound on the load of the fullest rank.

    The load is at least the mean over the ranks. Also, among any k·ranks + 1 units, at least k + 1 are on the
    same rank. So for each k, the load is at least the sum of the k + 1 smallest of the k·ranks + 1 largest
    units.
    """
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
    """Assign units to the lightest rank, largest unit first. Return the rank of each unit.

    If several ranks are equally light, the one with the fewest units gets it.
    """
    ranks_of = [0] * len(sizes)
    lightest = [(0, 0, rank) for rank in range(ranks)]
    for unit in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        load, units, rank = lightest[0]
        ranks_of[unit] = rank
        heapq.heapreplace(lightest, (load + sizes[unit], units + 1, rank))
    return ranks_of


def _exchange(sizes: Sequence[int], ranks_of: list[int], ranks: int, bound: int) -> None:
    """Improve an assignment in place, by moving units off the fullest rank or swapping them for smaller ones.

    Each step makes the change that brings the loads of the two ranks closest together. ``bound``: a lower
    bound on the load of the fullest rank.
    """
    # an empty unit at the end of each rank, so that swapping with it is a move
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
    """Look for a better assignment by binary search on the load of the fullest rank, and return it.

    The search starts with the range from ``bound`` to the load in ``ranks_of``, and stops when the two ends
    are close. A load counts as impossible if no assignment is found for it within the budget.
    """
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
    """Depth-first search for an assignment in which no rank has more than ``capacity``.

    The largest units are placed first, each on the fullest rank that still has room for it, then on emptier
    ones.
    """

    def __init__(self, sizes: Sequence[int], ranks: int, capacity: int) -> None:
        self.order = sorted(range(len(sizes)), key=lambda i: -sizes[i])
        self.sizes = [sizes[i] for i in self.order]
        self.rest = [sum(self.sizes[place:]) for place in range(len(sizes) + 1)]
        self.smallest = min((size for size in sizes if size), default=0)
        self.free, self.ranks, self.nodes = [capacity] * ranks, [0] * len(sizes), NODES
        self.failed: set[tuple[int, ...]] = set()

    def run(self) -> list[int] | None:
        """Return the rank of each unit, or None if no assignment is found within the budget."""
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
        """Return the ranks that have room for a unit of this size, fullest first.

        Of several equally full ranks, only one is returned.
        """
        rooms = {room: rank for rank, room in reversed(list(enumerate(self.free))) if room >= size}
        return [rooms[room] for room in sorted(rooms)]
