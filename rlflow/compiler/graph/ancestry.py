"""How the rows of a graph are related, as far as is known before a run.

This determines which columns can be merged, and how many rows there can be.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Literal

from rlflow.author.memory import Buffer
from rlflow.author.node_options import ChooseOptions, DrawOptions, RepeatOptions
from rlflow.compiler.graph.model import Graph, Node, Op, RowAxis

Axes = Sequence[RowAxis]
LOSSY = ("chosen", "encoded", "joined")  # steps after which rows of the origin may have no rows left


class Merge(Enum):
    """What the rows of one axis get when a column of another axis is merged into them."""

    NEVER = "they are unrelated, or several values belong to one row"
    WHOLE = "the rows were taken as they are, with their tokens"
    EACH = "a value for each row"
    SOME = "a value for some of the rows"
    TOKENS = "a value for some of the tokens of each row"


def line(axes: Axes, axis: int) -> Iterator[int]:
    """Yield the axis, its parent, its parent's parent, and so on."""
    step: int | None = axis
    while step is not None:
        yield step
        step = axes[step].parent


def chosen_from(axes: Axes, axis: int) -> Iterator[int]:
    """Yield the axis, the axis that its rows were chosen from, and so on."""
    for step in line(axes, axis):
        yield step
        if axes[step].step != "chosen":
            return


def merge(axes: Axes, axis: int, other: int, by_group: bool) -> Merge:
    """Determine what the rows of ``axis`` get when a column of ``other`` is merged into them.

    The column has one value per row, or per group if ``by_group``.
    """
    if axis == other:
        return Merge.WHOLE
    ancestry = list(line(axes, axis))
    up = list(itertools.takewhile(lambda step: step not in ancestry, line(axes, other)))
    meeting = axes[up[-1]].parent if up else other
    if meeting is None:
        return Merge.NEVER
    down = list(itertools.takewhile(lambda step: step != meeting, ancestry))
    all_chosen = all(axes[step].step == "chosen" for step in down)
    if not up:
        return Merge.WHOLE if all_chosen else Merge.EACH
    if axes[up[-1]].step == "cut":
        return Merge.TOKENS if all_chosen and _values(axes, up[:-1], by_group) == 1 else Merge.NEVER
    if _values(axes, up, by_group) != 1:
        return Merge.NEVER
    return Merge.SOME if any(axes[step].step in LOSSY for step in up) else Merge.EACH


def _values(axes: Axes, steps: Sequence[int], by_group: bool) -> int:
    """Return how many values there are per row of the origin, or 0 if unknown.

    ``steps``: the chain of axes from that of the values to the direct child of the origin. With ``by_group``,
    there is one value per group.
    """
    # joined rows have a parent only if their groups are the rows of one prompt, as with sampled rows
    sampled = [step for step in steps if axes[step].step in ("sampled", "joined")]
    counted = sampled[1:] if by_group else sampled  # a group is the rows of the last sampling from one row
    if any(axes[step].step == "cut" for step in steps):
        return 0
    values = 1
    for step in counted:
        values *= axes[step].samples
    return values


def common_prompts(axes: Axes, parts: Sequence[int]) -> int | None:
    """Return the nearest axis without groups that all parts were made from, or None if there is none."""
    others = [set(line(axes, part)) for part in parts[1:]]
    return next(
        (
            step
            for step in line(axes, parts[0])
            if not axes[step].grouped and all(step in other for other in others)
        ),
        None,
    )


def origins(axes: Axes, axis: int) -> set[int]:
    """Return all axes that the rows of ``axis`` were made from, including itself and those joined."""
    reached = {axis}
    for origin in (axes[axis].parent, *axes[axis].parts):
        reached |= origins(axes, origin) if origin is not None else set()
    return reached


def sources(axes: Axes, axis: int) -> set[int]:
    """Return the axes whose rows ``axis`` contains unchanged.

    These are the axis itself and those it was chosen or joined from.
    """
    reached, step = {axis}, axes[axis]
    if step.step == "chosen" and step.parent is not None:
        reached |= sources(axes, step.parent)
    for part in step.parts:
        reached |= sources(axes, part)
    return reached


def expected_rows(
    graph: Graph, prompts: int, repeats: Literal["groups", "prompts"] = "groups"
) -> dict[int, int]:
    """Return each axis's maximum number of rows in an iteration with ``prompts`` prompts.

    A `repeat` is assumed to keep as many groups as it asks for (``repeats="groups"``), or one per prompt
    (``repeats="prompts"``).
    """
    makers = {node.makes: node for node in graph.nodes if node.makes is not None}
    counts: dict[int, int] = {}
    for number, axis in enumerate(graph.axes):
        maker = makers.get(number)
        if maker is not None and isinstance(maker.settings, DrawOptions):
            counts[number] = _drawn(graph, axis, maker)
        elif maker is not None and isinstance(maker.settings, RepeatOptions):
            counts[number] = (maker.settings.groups if repeats == "groups" else prompts) * max(
                axis.samples, 1
            )
        else:
            counts[number] = _rows(graph, axis, maker, counts, prompts)
    return counts


def _drawn(graph: Graph, axis: RowAxis, draw: Node) -> int:
    """Return the maximum number of rows that a draw takes."""
    spec = next(slot.spec for slot in graph.memory if slot.name == draw.memory)
    assert isinstance(spec, Buffer)
    count = draw.options(DrawOptions).count
    most = spec.bound if count is None else min(count, spec.bound)
    return most * (max(axis.samples, 1) if spec.unit == "groups" else 1)


def _rows(graph: Graph, axis: RowAxis, maker: Node | None, counts: Mapping[int, int], prompts: int) -> int:
    if axis.parts:
        return sum(counts[part] for part in axis.parts)
    if axis.parent is None:
        return prompts * (2 if axis.grouped else 1)  # if the data are pairs, each record has two rows
    if axis.step == "chosen":
        choice = maker.settings if maker is not None else None
        if not isinstance(choice, ChooseOptions) or not choice.count:
            return counts[axis.parent]
        groups = expected_groups(graph, axis.parent, counts) if choice.per == "group" else 1
        return min(counts[axis.parent], choice.count * groups)
    return counts[axis.parent] * max(axis.samples, 1)


def expected_groups(graph: Graph, axis: int, rows: Mapping[int, int]) -> int:
    """Return an axis's maximum number of groups, or of rows if it has no groups.

    ``rows``: each axis's maximum number of rows.
    """
    entry = graph.axes[axis]
    if entry.parts:
        groups = sum(expected_groups(graph, part, rows) for part in entry.parts)
        return groups if entry.parent is None else min(groups, rows[entry.parent])
    if entry.step in ("chosen", "encoded") and entry.parent is not None:
        return min(rows[axis], expected_groups(graph, entry.parent, rows))
    pairs = 2 if entry.parent is None and entry.grouped and not entry.samples else 1
    return rows[axis] // max(entry.samples, pairs, 1)


def ahead_of_training(graph: Graph) -> set[int]:
    """Return the ids of nodes that run ahead of training: sampling nodes and what they depend on.

    The nodes that provide the data and the state aren't included.
    """
    ahead: set[int] = set()
    for node in reversed(graph.nodes):
        if node.op in (Op.GENERATE, Op.REPEAT) or node.id in ahead:
            makers = {graph.makers[axis] for axis in graph.works_on(node) if axis in graph.makers}
            ahead |= {node.id, *makers, *(item.column.node for item in node.inputs)}
    return {i for i in ahead if graph.nodes[i].op not in (Op.DATA, Op.STATE)}
