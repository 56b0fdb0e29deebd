"""Group rows whose prompts begin with the same tokens into families, so that a trainer runs the shared prefix
of each family through the model only once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlflow.author.batch import Batch, Data

LEAST = 4  # shorter prefixes are not worth sharing


@dataclass(frozen=True)
class Family:
    """Rows whose prompts share their first ``shared`` tokens, by index in ascending order.

    Every prompt has at least one token after the shared prefix. All rows that share no prefix form one
    family, with ``shared`` 0.
    """

    rows: tuple[int, ...]
    shared: int


def families(prompts: Data) -> list[Family]:
    """Group the rows of a prompt column into families such that as few tokens as possible are computed.
    Families are ordered by their first row."""
    rows_of: dict[bytes, list[int]] = {}
    for row, tokens in enumerate(prompts.split()):
        # big-endian bytes sort in the order of the tokens
        rows_of.setdefault(tokens.numpy().astype(">i8").tobytes(), []).append(row)
    distinct = sorted(rows_of)
    alone: list[int] = []
    families = []
    for begin, end, shared in _cut(
        [np.frombuffer(each, dtype=">i8") for each in distinct], [len(rows_of[each]) for each in distinct]
    ):
        rows = sorted(row for each in distinct[begin:end] for row in rows_of[each])
        if shared and len(rows) > 1:
            families.append(Family(tuple(rows), shared))
        else:
            alone += rows
    return sorted(
        [*families, *([Family(tuple(sorted(alone)), 0)] if alone else [])], key=lambda family: family.rows[0]
    )


def _cut(prompts: Sequence[np.ndarray], counts: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Split sorted, distinct prompts into consecutive runs such that sharing each run's prefix saves the most
    tokens. Yields (first prompt, end, number of shared tokens) for each run.

    counts: the number of rows per prompt. In a run with n rows, shared tokens are computed once rather than n
    times. This uses dynamic programming: the best split of the first prompts extends the best split of fewer
    prompts.
    """
    before = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    with_next = np.array([_common(one, other) for one, other in itertools.pairwise(prompts)], dtype=np.int64)
    best, begins = np.zeros(len(prompts) + 1, dtype=np.int64), []
    for last, prompt in enumerate(prompts):
        common = np.minimum.accumulate(np.concatenate([[len(prompt) - 1], with_next[:last][::-1]]))[::-1]
        common = np.where(common < LEAST, 0, common)
        saved = best[: last + 1] + (before[last + 1] - before[: last + 1] - 1) * common
        begin = last - int(saved[::-1].argmax())
        best[last + 1] = saved[begin]
        begins.append((begin, int(common[begin])))
    end = len(prompts)
    while end:
        begin, common_tokens = begins[end - 1]
        yield begin, end, common_tokens
        end = begin


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """Return the length of the common prefix of two prompts, not counting the last token of either."""
    most = min(len(one), len(other))
    differ = (one[:most] != other[:most]).nonzero()[0]
    return min(int(differ[0]) if len(differ) else most, most - 1)


def packed_microbatches(batch: Batch, units: Sequence[Tensor], *, tokens: int) -> Iterator[list[Tensor]]:
    """Yield the units of each micro-batch, keeping units of the same family (rows whose prompts begin with
    the same tokens) next to each other. A unit is a tensor of row indices that must stay together: a row or a
    group.

    A micro-batch has at most ``tokens`` tokens, or a single unit. A family's shared prefix counts once per
    micro-batch, and the other tokens of each row count in full.
    """
    rows = torch.cat(list(units)) if units else torch.zeros(0, dtype=torch.int64)
    prompts = batch.data["prompt_tokens"].take(rows, batch.axis)
    whole = (prompts.row_lengths + batch.data["tokens"].row_lengths[rows]).tolist()
    family_of, own = dict[int, Family](), dict[int, int]()
    for family in families(prompts):
        family_of |= {int(rows[i]): family for i in family.rows}
        own |= {int(rows[i]): whole[i] - family.shared for i in family.rows}
    order = sorted(
        units, key=lambda unit: (min(int(rows[i]) for i in family_of[int(unit[0])].rows), int(unit[0]))
    )
    return _filled(order, family_of, own, tokens)


def _filled(
    units: Sequence[Tensor], family_of: dict[int, Family], own: dict[int, int], room: int
) -> Iterator[list[Tensor]]:
    together: list[Tensor] = []
    counted: set[int] = set()
    used: float = math.inf
    for unit in units:
        members = unit.tolist()
        new = {
            id(family_of[row]): family_of[row].shared for row in members if id(family_of[row]) not in counted
        }
        added = sum(new.values()) + sum(own[row] for row in members)
        if used + added > room:
            if together:
                yield together
            together, counted, used = [], set(), 0
            new = {id(family_of[row]): family_of[row].shared for row in members}
            added = sum(new.values()) + sum(own[row] for row in members)
        together.append(unit)
        counted |= new.keys()
        used += added
    if together:
        yield together
