"""``ask``, ``choose`` and ``concat``: make rows from rows."""

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
    """Make a follow-up prompt from each row of ``batch``, in order, with the text of ``column``.

    The role that samples from the prompts formats them like data prompts. ``after="tokens"``: the text
    follows the row's prompt and response as another turn; the sampled ids are unchanged.

    ``tokens_until``: the model continues from the start of the row's own response. An integer column gives
    the number of tokens n to continue from, one per row. A bool token column makes one follow-up prompt for
    each True, which continues from the tokens before it. A float column with one value per follow-up prompt
    can be merged back into ``batch``: it becomes a token column with NaN at other tokens. ``tokens`` then
    hold the continuation only; ``completion`` is the text of both.

    Columns with one value per row are copied. Token columns, ``completion``, ``finish`` and ``group`` are
    not. Follow-up prompts that are longer than the longest prompt are dropped and counted as
    ``ask/too_long``.
    """
    by_text = isinstance(column, str) and tokens_until is None and after in (None, "tokens")
    by_tokens = column is None and isinstance(tokens_until, str) and after is None
    if not (by_text or by_tokens):
        raise FlowError(
            Problem(
                "ask-column",
                "ask takes the name of a text column, or of a column with the number of tokens to "
                "continue from",
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
    """Keep the rows of ``batch`` that a bool column marks, or the rows with the largest values of ``top``.

    With ``column``: the rows where it is True. With ``top``: ``count`` rows of the batch or of each group;
    ties go to the earlier row, and NaN is never chosen. Row order stays. If no row is left, the iteration is
    skipped. The metric ``choose/dropped`` counts dropped rows.
    """
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
                "choose takes a bool column, or a column to rank by and a count",
                call_place(),
                found=f"column={column!r}, top={top!r}, count={count!r}, per={per!r}",
                expected='choose(batch, "hard"), or choose(batch, top="scores", count=2, per="group")',
                remedy="write one of the two forms, with a count of at least 1",
            )
        )
    return current().choose(batch, str(column or top), ChooseOptions(count or 0, per))


def concat(*batches: Any) -> Any:
    """Join the rows of all batches, one batch after another, with the columns that all have.

    Groups of different batches stay separate.
    """
    if len(batches) < 2:
        raise FlowError(
            Problem(
                "concat-arguments",
                "concat needs two batches or more",
                call_place(),
                found=f"{len(batches)} batches",
                expected="concat(first, second)",
                remedy="pass each batch as an argument of its own",
            )
        )
    return current().concat(batches)
