"""The rules for the bodies of `repeat`, with the problem for each violation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlflow.compiler.graph.ancestry import line
from rlflow.compiler.graph.model import Graph, RowAxis
from rlflow.errors import Place, Problem, listed, nearest


def chosen_prompts(axes: Sequence[RowAxis], rows: int) -> bool:
    """Return True if the rows of this axis are the body's prompts or were chosen from them."""
    return (
        all(axes[step].step == "chosen" or axes[step].parent is None for step in line(axes, rows))
        and not axes[rows].grouped
    )


def body_rows(axes: Sequence[RowAxis], rows: int, place: Place | None) -> Iterator[Problem]:
    """Yield a problem if a `repeat` body returns follow-up prompts, encoded rows or joined rows.

    Since a `repeat` counts groups of prompts, the body must return its prompts or rows sampled from them.
    """
    if any(axes[step].step in ("asked", "cut", "encoded", "joined") for step in line(axes, rows)):
        yield Problem(
            "repeat-rows",
            "a `repeat` body returns follow-up prompts, encoded rows or joined rows",
            place,
            found="rows made from other rows",
            expected="rows sampled from the prompts of the body",
            remedy="call ask, encode and concat after the `repeat`",
        )


def no_keep(name: str, columns: Sequence[str], place: Place | None, definition: Place | None) -> Problem:
    """Return the problem of a `repeat` body that doesn't return the column ``keep``."""
    return Problem(
        "repeat-keep",
        f"the `repeat` body '{name}' does not return 'keep'",
        place,
        definition,
        found=listed(columns),
        expected="the group column keep: bool",
        nearest=nearest("keep", columns),
        remedy='merge a stage with rows="group" that gives "keep" before the body returns',
    )


def body_result(name: str, value: object, place: Place | None, definition: Place | None) -> Problem:
    """Return the problem of a `repeat` body that returns something other than a batch."""
    return Problem(
        "repeat-result",
        f"the `repeat` body '{name}' does not return a batch",
        place,
        definition,
        found=type(value).__name__,
        expected="a batch with the group column keep",
        remedy="return the batch",
    )


def state_in_body(what: str, names: Sequence[str], place: Place | None) -> Problem:
    """Return the problem of a stage that sets state inside a `repeat` body."""
    return Problem(
        "repeat-state",
        f"{what} sets state inside a `repeat` body",
        place,
        found=listed(names),
        expected="state that is only read",
        remedy="set it after the `repeat`",
    )


def body_rules(graph: Graph, place: Place | None) -> Iterator[Problem]:
    """Yield a problem for each node that changes weights in a `repeat` body.

    A body can run any number of times, so it mustn't train.
    """
    for node in graph.nodes:
        if node.writes:
            yield Problem(
                "repeat-update",
                f"'{node.name}' changes weights inside a `repeat` body",
                node.place,
                place,
                found=node.name,
                expected="sampling, scoring and stages",
                remedy="update after the `repeat`",
            )


def repeat_prompts(columns: Sequence[str], place: Place | None) -> Problem:
    """Return the problem of calling `repeat` on something other than the flow's own prompts.

    ``columns``: those that were added to the prompts.
    """
    return Problem(
        "repeat-prompts",
        "repeat draws fresh prompts from the data, so it must start from the data's prompts",
        place,
        found=f"columns made by the flow: {listed(columns)}" if columns else "rows that were sampled",
        expected="the prompts",
        remedy="pass the flow's own prompts, and make other columns inside the body",
    )
