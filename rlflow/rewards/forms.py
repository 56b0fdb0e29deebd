"""The forms of reward functions that other projects call, known by their parameters, and how a row is handed
to them.

verl calls ``compute_score(data_source, solution_str, ground_truth, extra_info)`` for a row, OpenRLHF
``reward_func(queries, prompts, labels)`` for a batch, where a query is a prompt with its completion.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlflow.author.columns import MODEL_PROMPT
from rlflow.rewards import values

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Form:
    """How another project calls a reward function."""

    project: str
    parameters: tuple[str, ...]  # that the project passes
    reads: tuple[str, ...]  # columns behind them
    # the field of the data that is handed over in place of the column ``answer``, where the data have it
    truth: str
    fields: tuple[str, ...] = ()  # further fields of the data that are handed over where the data have them
    batch: bool = False  # whether one call scores several rows


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
LISTED = "the list that the function returned has"
FORMS = {form.project: form for form in (VERL, OPENRLHF)}


def form_of(parameters: Collection[str]) -> Form | None:
    """The form of a function with these parameters; None for one that names columns."""
    if "solution_str" in parameters and "ground_truth" in parameters:
        return VERL
    return (
        OPENRLHF if "queries" in parameters and ("prompts" in parameters or "labels" in parameters) else None
    )


def by_row(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of verl's form as one of columns and fields."""
    takes = _takes(function, VERL)

    def scored(*, completion: str, answer: Any = None, **fields: Any) -> Any:
        fields = {"data_source": None, "extra_info": {}, "ground_truth": answer, **fields}
        passed = {name: fields.pop(name) for name in ("data_source", "extra_info", "ground_truth")} | {
            "solution_str": completion
        }
        return function(**{name: passed[name] for name in takes}, **fields)

    return scored


def by_batch(function: Callable[..., Any], rows: Sequence[Row]) -> Iterator[Any]:
    """The verdicts on rows by a function of OpenRLHF's form. Where a call for all of them raises, each row is
    scored by itself."""
    try:
        yield from _verdicts(_called(function, rows), len(rows))
    except BaseException as error:  # a user's function may raise anything, SystemExit included
        if len(rows) == 1:
            yield values.raised(error)
            return
        for row in rows:
            yield from by_batch(function, [row])


def _called(function: Callable[..., Any], rows: Sequence[Row]) -> Any:
    passed: dict[str, list[Any]] = {"queries": [], "prompts": [], "labels": []}
    for row in rows:
        query, prompt, label = asked(row)
        passed["queries"].append(query)
        passed["prompts"].append(prompt)
        passed["labels"].append(label)
    returned = function(**{name: passed[name] for name in _takes(function, OPENRLHF)})
    if inspect.iscoroutine(returned):
        import asyncio

        return asyncio.run(returned)
    return returned


def asked(row: Row) -> tuple[str, str, Any]:
    """Three texts of a row that OpenRLHF hands over: the query, which is the prompt with its completion, the
    prompt as the model read it, and the label. Rows that a flow asks have the text of the prompt alone."""
    prompt = row.get(MODEL_PROMPT, row["prompt"])
    return prompt + row["completion"], prompt, row.get("label", row.get("answer"))


def _takes(function: Callable[..., Any], form: Form) -> list[str]:
    """The parameters of a form that the function takes."""
    parameters = inspect.signature(function).parameters
    rest = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return [name for name in form.parameters if rest or name in parameters]


def _verdicts(returned: Any, count: int) -> list[Any]:
    """The verdicts on so many rows in what a function returned: their numbers, or a dictionary with
    ``rewards`` and, beside it or under ``extra_logs``, other lists of a number for each row."""
    rewards = returned.get("rewards") if isinstance(returned, Mapping) else returned
    scores = _row_values(rewards, count)
    if scores is None:
        return [_bad(rewards, count)] * count
    if not isinstance(returned, Mapping):
        return [values.number(score, LISTED) for score in scores]
    logs = returned.get("extra_logs")  # a number of the whole batch counts for each of its rows
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
    """The values of rows in a list, a tensor or an array; None where it is not one value for each row."""
    listed = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(listed, int | float) and count == 1:
        return [listed]
    return list(listed) if isinstance(listed, list | tuple) and len(listed) == count else None


def _bad(value: Any, count: int) -> list[str]:
    size = f" of {len(value)}" if hasattr(value, "__len__") and not isinstance(value, str | Mapping) else ""
    return [
        "type",
        f"the function returned {type(value).__name__}{size} for {count} rows, not a number for each",
    ]
