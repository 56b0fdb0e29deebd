"""``ask``, ``choose`` and ``concat``: rows that are made of rows."""

from __future__ import annotations

from typing import Any, Literal

from rlflow.author.node_options import ChooseOptions
from rlflow.author.scope import current
from rlflow.author.source_lines import call_place
from rlflow.errors import FlowError, Problem


def ask(
    batch: Any,
    column: str | None = None,
    *,
    after: Literal["tokens"] | None = None,
    tokens_until: str | None = None,
) -> Any:
    """A prompt for each row of ``batch``, in order: the text of ``column``, as the model that samples from it
    reads prompts.

    ``after="tokens"``: the text follows the row's prompt and response as another turn; ids that were sampled
    stay as they are. With ``tokens_until`` the model goes on from the beginning of the row's own response:
    the first n of its tokens where the column has a whole number n per row, and where it is a bool per token,
    the tokens before each True: one asked row for each of them, and what has one value per asked row comes up
    to the rows that asked as a value per token, NaN elsewhere. What is sampled then is the continuation;
    ``completion`` is the text of both.

    Columns with one value per row go along; token columns, ``completion``, ``finish`` and ``group`` do not.
    Rows whose prompt is longer than the longest prompt are left out and counted as ``ask/too_long``.
    """
    by_text = isinstance(column, str) and tokens_until is None and after in (None, "tokens")
    by_tokens = column is None and isinstance(tokens_until, str) and after is None
    if not (by_text or by_tokens):
        raise FlowError(
            Problem(
                "ask-column",
                "ask takes the name of a text column, or of one that says how many tokens to go on from",
                call_place(),
                found=f"column={column!r}, after={after!r}, tokens_until={tokens_until!r}",
                expected='ask(batch, "question"), ask(batch, "question", after="tokens") or ask(batch, '
                'tokens_until="cut")',
                remedy="merge the stage that gives the column, then name it in one of these forms",
            )
        )
    return current().ask(
        batch, str(column or tokens_until), "until" if by_tokens else "after" if after else "text"
    )


def choose(
    batch: Any,
    column: str | None = None,
    *,
    top: str | None = None,
    count: int | None = None,
    per: Literal["group", "batch"] = "batch",
) -> Any:
    """The rows of ``batch`` where the bool ``column`` is True; or the ``count`` rows with the largest
    ``top``, of the batch or of each group, ties by order, NaN never. Their order stays. Where none is left
    the iteration is skipped; how many went is ``choose/dropped``."""
    by_flag = isinstance(column, str) and top is None and count is None and per == "batch"
    by_rank = (
        column is None
        and isinstance(top, str)
        and isinstance(count, int)
        and not isinstance(count, bool)
        and count >= 1
    )
    if not (by_flag or (by_rank and per in ("group", "batch"))):
        raise FlowError(
            Problem(
                "choose-arguments",
                "choose takes a bool column, or a column to rank by and how many",
                call_place(),
                found=f"column={column!r}, top={top!r}, count={count!r}, per={per!r}",
                expected='choose(batch, "hard"), or choose(batch, top="scores", count=2, per="group")',
                remedy="write one of the two forms, with a count of at least 1",
            )
        )
    return current().choose(batch, str(column or top), ChooseOptions(count or 0, per))


def concat(*batches: Any) -> Any:
    """The rows of all batches, one batch after another, with the columns that all have. Groups of different
    batches stay apart."""
    if len(batches) < 2:
        raise FlowError(
            Problem(
                "concat-arguments",
                "concat joins the rows of two batches or more",
                call_place(),
                found=f"{len(batches)} batches",
                expected="concat(first, second)",
                remedy="pass each batch by itself",
            )
        )
    return current().concat(batches)
