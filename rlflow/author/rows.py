"""``ask``, ``encode``, ``choose`` and ``concat``, which make a batch with different rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from rlflow.author.node_options import ChooseOptions, ConcatOptions, EncodeOptions
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
    """Make follow-up prompts from the rows of ``batch``, in order.

    With ``column``, each row gives one prompt, which is the text in that column. The role that samples from
    it formats it like a prompt from the data. With ``after="tokens"``, the text is added to the row's own
    prompt and response as another turn, without changing the sampled ids.

    With ``tokens_until``, prompts continue the row's own response. An integer column gives one prompt per
    row, which includes that many response tokens. A bool token column gives one prompt per True, which
    includes the response tokens before it. If you merge a float column of these prompts back into ``batch``,
    it becomes a token column with NaN at all other tokens. After sampling, ``tokens`` only has the
    continuation, while ``completion`` has the text of the whole response.

    Prompts keep those columns of ``batch`` that have one value per row, except ``completion``, ``finish`` and
    ``group``. Prompts above the maximum prompt length are dropped and counted in ``ask/too_long``.
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


def encode(batch: Any, column: str, role: Any, *, max_tokens: int | None = None) -> Any:
    """Make rows whose responses are the texts in a column, so that the role can be trained on them.

    Use it for demonstrations, rewritten responses and labels in hindsight. Each row of ``batch`` gives one
    row, with the same prompt. If ``batch`` has groups, they stay; otherwise, each row is a group of its own,
    as if the role had sampled the text. The new rows have the columns ``tokens``, ``mask``, ``completion``,
    ``finish`` ("stop"), ``temperature`` (1.0), ``policy_version`` (-1) and ``group``. They also keep the
    columns of ``batch``, except those of the old responses' tokens and episodes.

    The text is encoded with the tokenizer of ``role``, and ends like one of the role's own replies. Control
    tokens that are written out in it become ordinary tokens. It can also be messages that begin and end with
    the assistant; then ``mask`` is True for what the assistant wrote.

    Rows with an empty text are dropped and counted in ``encode/empty``. Rows with more than ``max_tokens``
    tokens, or too long for the model with their prompt, are dropped and counted in ``encode/too_long``.
    """
    limit = max_tokens is None or (
        isinstance(max_tokens, int) and not isinstance(max_tokens, bool) and max_tokens >= 1
    )
    name = getattr(role, "__dict__", {}).get("_name")
    if not (isinstance(column, str) and isinstance(name, str) and limit):
        raise FlowError(
            Problem(
                "encode-arguments",
                "encode takes the name of a text column and a role of the flow",
                call_place(),
                found=f"column={column!r}, role={role!r}, max_tokens={max_tokens!r}",
                expected='encode(batch, "demonstration", actor), with max_tokens=None or at least 1',
                remedy="pass the column's name, then the role that is trained on the rows",
            )
        )
    return current().encode(batch, column, EncodeOptions((name,), max_tokens))


def choose(
    batch: Any,
    column: str | None = None,
    *,
    top: str | None = None,
    count: int | None = None,
    per: Literal["group", "batch"] = "batch",
) -> Any:
    """Keep the rows where a bool column is True, or the rows with the largest values.

    ``choose(batch, column)`` keeps the rows with True. ``choose(batch, top=…, count=…)`` keeps the ``count``
    rows with the largest values, either in the whole batch or in each group (``per``). Among equal values,
    earlier rows come first; rows with NaN are never kept. Rows stay in their original order.
    ``choose/dropped`` counts the rows that are dropped. If no rows are left, the iteration is skipped.
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


def concat(
    *batches: Any,
    fill: Mapping[str, bool | int | float | str] | None = None,
    groups: Literal["prompts"] | None = None,
) -> Any:
    """Join batches into one, with the rows of one batch after another.

    The result has the columns that all batches have. With ``fill``, it also has columns that only some of
    them have: their value in the other batches' rows is ``fill[name]``, for each row or each token. The row
    column ``part`` tells which batch each row comes from, counted from 0.

    Groups of different batches stay separate, unless ``groups="prompts"``. Then all rows that descend from
    the same prompt form one group, and groups come in the order of the prompts. The batches must be made
    from the same prompts, such as by `generate` and `encode`. Equal prompts of different rows don't count as
    the same.
    """
    plain = fill is None or (
        isinstance(fill, Mapping)
        and all(isinstance(n, str) and isinstance(v, bool | int | float | str) for n, v in fill.items())
    )
    if len(batches) < 2 or not plain or groups not in (None, "prompts"):
        raise FlowError(
            Problem(
                "concat-arguments",
                "concat needs two batches or more, and numbers or texts to fill columns with",
                call_place(),
                found=f"{len(batches)} batches, fill={fill!r}, groups={groups!r}",
                expected='concat(first, second), with fill={"sampled_logprobs": 0.0} or groups="prompts"',
                remedy="pass each batch as an argument of its own, and the value of each filled column by name",
            )
        )
    return current().concat(batches, ConcatOptions(groups, tuple((fill or {}).items())))
