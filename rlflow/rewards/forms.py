"""Calls reward functions written for verl, OpenRLHF or TRL, which rlflow recognizes by their parameters.

verl calls ``compute_score(data_source, solution_str, ground_truth, extra_info)`` for one row. OpenRLHF calls
``reward_func(queries, prompts, labels)`` for a batch; a query is a prompt followed by its completion. TRL
calls ``reward(prompts, completions, …)`` for a batch, with a list for each column of the data.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlflow.author.columns import CONVERSATION, MODEL_PROMPT
from rlflow.rewards import values

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Form:
    """A calling convention for reward functions: the parameters that another project passes."""

    project: str
    parameters: tuple[str, ...]  # the parameters that the project passes
    reads: tuple[str, ...]  # the columns that fill them
    # The data field that replaces the column ``answer`` if the data have it; empty for none.
    truth: str
    fields: tuple[str, ...] = ()  # further data fields that are passed if the data have them
    batch: bool = False  # whether one call scores several rows
    columns: bool = False  # whether further parameters are columns from the data, each as a list
    # Parameters that the project passes and rlflow does not, and what to do instead.
    lacking: Mapping[str, str] = field(default_factory=dict)


VERL = Form(
    "verl",
    ("data_source", "solution_str", "ground_truth", "extra_info"),
    ("completion", "answer"),
    "ground_truth",
    ("data_source", "extra_info"),
)
OPENRLHF = Form(
    "OpenRLHF", ("queries", "prompts", "labels"), ("prompt", "completion", "answer"), "label", batch=True
)
TRL = Form(
    "TRL",
    ("prompts", "completions", "completion_ids", "log_extra", "log_metric"),
    ("prompt", "completion"),
    "",
    batch=True,
    columns=True,
    lacking={
        "trainer_state": "give it a default: the state of TRL's trainer does not exist here",
        "environments": "use a reward of an environment: --env FILE.py:Class",
    },
)
LISTED = "the list returned by the function contains"
FORMS = {form.project: form for form in (VERL, OPENRLHF, TRL)}
# columns of a row that a function written for TRL gets under other names, or not at all
RENAMED = ("prompt", "completion", "tokens", CONVERSATION, MODEL_PROMPT)


def form_of(parameters: Collection[str]) -> Form | None:
    """Return the calling convention of a function with these parameters, or None if it's rlflow's own.

    In rlflow's own convention, each parameter names a column.
    """
    if "solution_str" in parameters and "ground_truth" in parameters:
        return VERL
    if "queries" in parameters and ("prompts" in parameters or "labels" in parameters):
        return OPENRLHF
    return TRL if "completions" in parameters or "completion_ids" in parameters else None


def by_row(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function written for verl, so that it takes rlflow's columns and data fields."""
    takes = _takes(function, VERL.parameters)

    def scored(*, completion: str, answer: Any = None, **fields: Any) -> Any:
        fields = {"data_source": None, "extra_info": {}, "ground_truth": answer, **fields}
        passed = {name: fields.pop(name) for name in ("data_source", "extra_info", "ground_truth")} | {
            "solution_str": completion
        }
        return function(**{name: passed[name] for name in takes}, **fields)

    return scored


def by_batch(function: Callable[..., Any], rows: Sequence[Row], form: Form = OPENRLHF) -> Iterator[Any]:
    """Call a function that scores several rows at once, and yield the verdict on each row.

    There is a single call for all rows. If it raises an exception, the function is called again for each row
    on its own.
    """
    try:
        yield from _verdicts(_called(function, rows, form), len(rows))
    except BaseException as error:  # a user's function may raise anything, SystemExit included
        if len(rows) == 1:
            yield values.raised(error)
            return
        for row in rows:
            yield from by_batch(function, [row], form)


def _called(function: Callable[..., Any], rows: Sequence[Row], form: Form) -> Any:
    log = _Log(len(rows))
    passed = _lists_of_trl(rows, log) if form is TRL else _lists_of_openrlhf(rows)
    returned = function(**{name: passed[name] for name in _takes(function, passed)})
    if inspect.iscoroutine(returned):
        import asyncio

        returned = asyncio.run(returned)
    return {"rewards": returned, "extra_logs": log.values} if log.values else returned


def _lists_of_openrlhf(rows: Sequence[Row]) -> dict[str, Any]:
    queries, prompts, labels = zip(*map(asked, rows), strict=True)
    return {"queries": list(queries), "prompts": list(prompts), "labels": list(labels)}


def _lists_of_trl(rows: Sequence[Row], log: _Log) -> dict[str, Any]:
    """Return what TRL passes for these rows: lists with a value per row, and functions for logging."""
    names = dict.fromkeys(name for row in rows for name in row if name not in RENAMED)
    prompts, completions = zip(*map(conversation, rows), strict=True)
    return {
        **{name: [row.get(name) for row in rows] for name in names},
        "prompts": list(prompts),
        "completions": list(completions),
        "completion_ids": [row.get("tokens") for row in rows],
        "log_extra": log.extra,
        "log_metric": log.metric,
    }


class _Log:
    """What a function written for TRL logs while it scores ``count`` rows."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.values: dict[str, Any] = {}

    def extra(self, column: str, values: Sequence[Any]) -> None:
        """Log a value for each row. Values that are not numbers are skipped later."""
        self.values[column] = values

    def metric(self, name: str, value: Any) -> None:
        """Log one number for all rows."""
        self.values[name] = [value] * self.count


def conversation(row: Row) -> tuple[Any, Any]:
    """Return (prompt, completion) of a row, as TRL passes them.

    If the prompt is messages, the completion is a list with one message from the assistant.
    """
    prompt = row.get(CONVERSATION) or row["prompt"]
    if isinstance(prompt, str):
        return prompt, row["completion"]
    return prompt, [{"role": "assistant", "content": row["completion"]}]


def asked(row: Row) -> tuple[str, str, Any]:
    """Return (query, prompt, label) of a row, as OpenRLHF passes them.

    The query is the prompt followed by the completion. The prompt is the text that the model read, including
    the chat template. A follow-up prompt is the column ``prompt``, without the chat template.
    """
    prompt = row.get(MODEL_PROMPT, row["prompt"])
    return prompt + row["completion"], prompt, row.get("label", row.get("answer"))


def _takes(function: Callable[..., Any], passed: Iterable[str]) -> list[str]:
    """Return the names in ``passed`` that a function accepts as keyword arguments."""
    parameters = inspect.signature(function).parameters
    rest = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return [name for name in passed if rest or name in parameters]


def _verdicts(returned: Any, count: int) -> list[Any]:
    """Split what one call for all rows returned into a verdict on each of the ``count`` rows.

    ``returned``: a list with a number per row, or a dictionary with such a list under ``rewards``. The
    dictionary, or its ``extra_logs``, may have more lists with a value per row.
    """
    rewards = returned.get("rewards") if isinstance(returned, Mapping) else returned
    scores = _row_values(rewards, count)
    if scores is None:
        return [_bad(rewards, count)] * count
    if not isinstance(returned, Mapping):
        return [values.number(score, LISTED) for score in scores]
    logs = returned.get("extra_logs")  # a single number for the batch applies to each of its rows
    beside = {
        name: value for name, value in returned.items() if name not in ("rewards", "extra_logs", values.SCORE)
    }
    beside |= logs if isinstance(logs, Mapping) else {}
    lists = {name: _row_values(value, count) or [value] * count for name, value in beside.items()}
    return [
        values.verdict(
            {values.SCORE: score, **{name: numbers[row] for name, numbers in lists.items()}}, LISTED
        )
        for row, score in enumerate(scores)
    ]


def _row_values(value: Any, count: int) -> list[Any] | None:
    """Convert a list, tensor or array to a list of ``count`` values, or None if it has another length."""
    listed = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(listed, int | float) and count == 1:
        return [listed]
    return list(listed) if isinstance(listed, list | tuple) and len(listed) == count else None


def _bad(value: Any, count: int) -> list[str]:
    size = f" of {len(value)}" if hasattr(value, "__len__") and not isinstance(value, str | Mapping) else ""
    return [
        "type",
        f"the function returned {type(value).__name__}{size} for {count} rows, not one number per row",
    ]
