"""The groups that a `repeat` samples, keeps and drops."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rlflow.author.batch import Batch
from rlflow.errors import SkipIteration
from rlflow.execution.account import REPLACED, Count, End, RowAccount, RowOutcome
from rlflow.execution.engine import Engine
from rlflow.execution.tally import Label, PartialMetric, PartialMetrics, known


class RepeatNames(NamedTuple):
    """The names under which an account counts the rows of a `repeat`."""

    node: str  # the `repeat` itself
    source: str  # the node in its body that samples
    placer: str = ""  # the stage in its body that returns the body's tokens


def repeat_groups(
    engine: Engine,
    body: Callable[[Batch], Batch],
    prompts: Batch,
    groups: int,
    tries: int,
    account: RowAccount,
    names: RepeatNames,
) -> tuple[Batch, PartialMetrics]:
    """Return up to ``groups`` groups kept by ``body``, in prompt order, and metrics.

    ``body`` is called at most ``tries`` times, each time with new prompts. The outcomes of all rows are added
    to ``account`` under ``names``. Raises SkipIteration if no group is kept.
    """
    more = (engine.take(len(prompts)) for _ in range(tries - 1))
    fresh = itertools.takewhile(len, more)  # records drawn by weight may be used up
    batches, tried = kept_groups(engine, body, itertools.chain([prompts], fresh), groups, account, names)
    joined = engine.joined(batches)
    wanted = joined.axis.slots < groups
    for source, count in row_counts(engine, joined, names, ~wanted):
        account.end(source, End(RowOutcome.SURPLUS, names.node, setting=f"groups={groups}"), count)
    return joined.rows(wanted), repeat_metrics(account, names, tried, groups)


def kept_groups(
    engine: Engine,
    body: Callable[[Batch], Batch],
    draws: Iterator[Batch],
    groups: int,
    account: RowAccount,
    names: RepeatNames,
    opening: Sequence[Batch] = (),
) -> tuple[list[Batch], int]:
    """Call ``body`` on batches of prompts until it has kept ``groups`` groups or the prompts run out.

    ``draws``: yields the batches of prompts. ``opening``: groups to put first, which count as kept. Returns
    batches of whole groups in prompt order, and the number of calls. The last call may give more groups than
    needed. The outcomes of rows are added to ``account`` under ``names``. Raises SkipIteration if there are
    no groups.
    """
    batches, count, tried = list(opening), sum(batch.axis.groups for batch in opening), 0
    while count < groups and (prompts := next(draws, None)) is not None:
        rows = body(prompts)
        keep = (
            engine.fetch(rows.select("keep"))["keep"].bool()
            if "keep" in rows
            else torch.ones(len(rows), dtype=torch.bool)
        )
        tried += 1
        for source, number in row_counts(engine, rows, names):
            (account.sample if source == names.source else account.place)(source, number)
        for source, number in row_counts(engine, rows, names, ~keep):
            account.end(source, End(RowOutcome.LEFT_OUT, names.node, "not kept"), number)
        batches.append(rows.rows(keep))
        count += batches[-1].axis.groups
    if count == 0:
        raise SkipIteration(f"the body kept none of {seen(account, names)} groups in {tried} tries")
    return [batch for batch in batches if len(batch)], tried


def row_counts(
    engine: Engine, rows: Batch, names: RepeatNames, where: Tensor | None = None
) -> Iterator[tuple[str, Count]]:
    """Yield (name, count) of the rows returned by the body of a `repeat`, by the node that sampled them.

    Rows that a stage in the body put in place of sampled ones are counted under the stage. ``where``: bool
    [rows], the rows to count; None counts all rows.
    """
    lengths = rows.data["tokens"].lengths if "tokens" in rows else None
    if REPLACED not in rows:
        yield names.source, Count.of(rows.axis, lengths, where)
        return
    replaced = engine.gather(rows.select(REPLACED))[REPLACED]
    own, others = (each if where is None else each & where for each in (~replaced, replaced))
    yield names.source, Count.of(rows.axis, lengths, own)
    if bool(others.any()):
        yield names.placer, Count.of(rows.axis, lengths, others, own)


def seen(account: RowAccount, names: RepeatNames) -> int:
    """Return how many groups the body of a `repeat` returned, whether they were kept or not.

    A group counts even if a stage replaced all its rows.
    """
    return account.sampled.get(names.source, Count()).groups


def repeat_metrics(
    account: RowAccount, names: RepeatNames, tried: int, groups: int
) -> dict[Label, PartialMetric]:
    """Compute the metrics of a `repeat` from its row account.

    ``tried``: how many times the body was called. Kept groups beyond ``groups`` are counted as ``surplus``:
    they are dropped, or carried over to a later iteration.
    """
    node, own, sampled = names.node, (names.source, names.placer), seen(account, names)
    dropped = sum(
        count.groups
        for (name, end), count in account.ends.items()
        if name in own and end.fate in (RowOutcome.LEFT_OUT, RowOutcome.READ) and end.node != names.placer
    )
    beyond = account.of(RowOutcome.SURPLUS, node).groups + account.of(RowOutcome.CARRIED, node).groups
    opened = (
        sum(account.opened.get(name, Count()).groups for name in own)
        - account.of(RowOutcome.STALE, node).groups
    )
    groups_kept = sampled + opened - dropped - beyond
    return known(
        {"tries": float(tried), "kept": float(groups_kept), "seen": float(sampled), "surplus": float(beyond)}
    )
