"""Parses the tool calls in sampled text.

If the tokenizer has a response template, transformers parses the calls. Otherwise, marks in the chat template
show which format the model's family uses for calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rlflow.author.messages import ToolCall, without_invalid_characters
from rlflow.errors import PlanError
from rlflow.training.pretrained import PARSERS

TAGGED = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)  # Hermes, Qwen 2.5 and 3
LISTED = re.compile(r"\[TOOL_CALLS\]\s*(\[.*\])", re.DOTALL)  # Mistral
ALONE = re.compile(r"^\s*(?:<\|python_tag\|>)?\s*(\{.*\})", re.DOTALL)  # Llama 3
MARKS = {
    "<tool_call>": TAGGED,
    "[TOOL_CALLS]": LISTED,
    "ipython": ALONE,
}  # text in a family's chat template → its pattern


def calls_by(
    tokenizer: Any, template: str, folder: object, opening: str = "", tools: Sequence[Mapping[str, Any]] = ()
) -> Callable[[Sequence[int]], list[ToolCall]]:
    """Return a function that takes sampled ids and returns the tool calls in them.

    ``template``: the chat template. ``opening``: a rendered prompt up to the beginning of the reply.
    ``tools``: JSON schemas of the tools. Raises PlanError if the format of the model's tool calls is unknown.
    """
    if parses_itself(tokenizer):
        newer = (
            {"prefix": opening, "tools": list(tools)} if getattr(tokenizer, "response_template", None) else {}
        )
        return lambda ids: list(_by_tokenizer(tokenizer, ids, newer))
    pattern = calls_pattern(template, folder)

    def calls(ids: Sequence[int]) -> list[ToolCall]:
        text = tokenizer.decode(list(ids), skip_special_tokens=False)
        return [call for match in pattern.finditer(text) for call in parsed(match[1])]

    return calls


def parses_itself(tokenizer: Any) -> bool:
    """True if transformers can parse the responses of models with this tokenizer."""
    return any(getattr(tokenizer, name, None) for name in PARSERS)


def calls_pattern(template: str, folder: object) -> re.Pattern[str]:
    """Return a regular expression that finds the tool calls of models with this chat template.

    ``folder``: the model folder, for error messages. Raises PlanError if the format of tool calls is unknown.
    """
    pattern = next((pattern for mark, pattern in MARKS.items() if mark in template), None)
    if pattern is None:
        raise PlanError.of(
            "env-tools",
            f"it is not known how models of {folder} write a tool call",
            found="a chat template without a known mark of calls",
            expected=f"a {PARSERS[0]} of the tokenizer, or one of {', '.join(MARKS)} in its template",
            remedy="use a model that was trained to call tools, or write an environment with step",
        )
    return pattern


def parsed(text: str) -> Iterator[ToolCall]:
    """Yield the tool calls in a JSON text: an object with name and arguments, or a list of such objects."""
    try:
        value, _ = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError) as error:
        yield ToolCall("", {}, f"the call is not valid JSON: {error}")
        return
    for each in value if isinstance(value, list) else [value]:
        yield _call(without_invalid_characters(each)[0])


def _call(value: Any) -> ToolCall:
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return ToolCall("", {}, "a call must be an object with the name of a tool and its arguments")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments, _ = without_invalid_characters(json.loads(arguments))
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, Mapping):
        return ToolCall(value["name"], {}, f"the arguments of {value['name']} are not an object")
    return ToolCall(value["name"], dict(arguments))


def _by_tokenizer(tokenizer: Any, ids: Sequence[int], more: Mapping[str, Any]) -> Iterator[ToolCall]:
    try:
        message = tokenizer.parse_response(tokenizer.decode(list(ids), skip_special_tokens=False), **more)
    except Exception as error:  # the template comes with the model and may raise any exception
        yield ToolCall("", {}, f"{type(error).__name__}: {error}")
        return
    for each in (message.get("tool_calls") or ()) if isinstance(message, Mapping) else ():
        yield _call(
            without_invalid_characters(each.get("function", each) if isinstance(each, Mapping) else each)[0]
        )
