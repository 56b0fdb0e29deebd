"""``ask``, ``choose`` and ``concat``, which make a batch with other rows."""

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
    """Return a batch of follow-up prompts, made from the rows of ``batch`` in order.

    With ``column``, each row gives one prompt: the text in that column. The role that samples from the prompt
    formats it like a prompt from the data. With ``after="tokens"``, the text follows the row's own prompt and
    response as another turn; the sampled ids stay the same.

    With ``tokens_until``, the prompts continue the row's own response. An integer column gives one prompt per
    row, with this number of response tokens. A bool token column gives one prompt for each True, with the
    response tokens before the True. A float column with one value for each of these prompts can be merged
    back into ``batch``: it becomes a token column with NaN at all other tokens. After sampling, ``tokens``
    has only the continuation, and ``completion`` has the text of the complete response.

    The prompts keep the columns of ``batch`` that have one value per row, except ``completion``, ``finish``
    and ``group``. If a prompt is longer than the maximum prompt length, it is dropped and counted as
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
    """Return the rows of ``batch`` where a bool column is True, or the rows with the largest values.

    ``choose(batch, column)`` keeps the rows with True. ``choose(batch, top=…, count=…)`` keeps the ``count``
    rows with the largest values, in the batch or in each group (``per``). If values are equal, it keeps the
    earlier row; it never keeps NaN. The rows stay in order. The metric ``choose/dropped`` counts dropped
    rows. If no row is left, the iteration is skipped.
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
    """Return one batch with the rows of all batches, one batch after another.

    It has the columns that all batches have. Groups of different batches stay separate.
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
