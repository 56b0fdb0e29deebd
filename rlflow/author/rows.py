"""``ask``, ``choose`` and ``concat``: rows that are made of rows."""

from __future__ import annotations

from typing import Any, Literal

from rlflow.author.scope import current
from rlflow.author.source import call_place
from rlflow.errors import FlowError, Problem


def ask(batch: Any, column: str) -> Any:
    """A prompt for each row of ``batch``, in order: the text of ``column``, as the model that samples from it reads prompts.

    Columns with one value per row go along; token columns, ``completion``, ``finish`` and ``group`` do not. Rows whose prompt is longer
    than the longest prompt are left out and counted as ``ask/too_long``.
    """
    if not isinstance(column, str):
        raise FlowError(Problem("ask-column", "ask takes the name of a text column", call_place(), found=type(column).__name__,
                                expected='ask(batch, "question")', remedy="merge the stage that gives the text, then name its column"))
    return current().ask(batch, column)


def choose(
    batch: Any, column: str | None = None, *, top: str | None = None, count: int | None = None, per: Literal["group", "batch"] = "batch"
) -> Any:
    """The rows of ``batch`` where the bool ``column`` is True; or the ``count`` rows with the largest ``top``, of the batch or of each
    group, ties by order, NaN never. Their order stays. Where none is left the iteration is skipped; how many went is ``choose/dropped``."""
    by_flag = isinstance(column, str) and top is None and count is None and per == "batch"
    by_rank = column is None and isinstance(top, str) and isinstance(count, int) and not isinstance(count, bool) and count >= 1
    if not (by_flag or (by_rank and per in ("group", "batch"))):
        raise FlowError(Problem("choose-arguments", "choose takes a bool column, or a column to rank by and how many", call_place(),
                                found=f"column={column!r}, top={top!r}, count={count!r}, per={per!r}",
                                expected='choose(batch, "hard"), or choose(batch, top="scores", count=2, per="group")',
                                remedy="write one of the two forms, with a count of at least 1"))
    return current().choose(batch, str(column or top), {"count": count or 0, "per": per})


def concat(*batches: Any) -> Any:
    """The rows of all batches, one batch after another, with the columns that all have. Groups of different batches stay apart."""
    if len(batches) < 2:
        raise FlowError(Problem("concat-arguments", "concat joins the rows of two batches or more", call_place(),
                                found=f"{len(batches)} batches", expected="concat(first, second)", remedy="pass each batch by itself"))
    return current().concat(batches)
