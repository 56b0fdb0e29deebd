"""Calls of tools in what a model said. transformers parses them where the tokenizer has a response template;
else the chat template tells how its family of models writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rlflow.author.messages import ToolCall, mended
from rlflow.errors import PlanError
from rlflow.training.pretrained import PARSERS

TAGGED = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)  # Hermes, Qwen 2.5 and 3
LISTED = re.compile(r"\[TOOL_CALLS\]\s*(\[.*\])", re.DOTALL)  # Mistral
ALONE = re.compile(r"^\s*(?:<\|python_tag\|>)?\s*(\{.*\})", re.DOTALL)  # Llama 3
MARKS = {"<tool_call>": TAGGED, "[TOOL_CALLS]": LISTED, "ipython": ALONE}  # of templates of these families


def calls_by(
    tokenizer: Any, template: str, folder: object, opening: str = "", tools: Sequence[Mapping[str, Any]] = ()
) -> Callable[[Sequence[int]], list[ToolCall]]:
    """A function from sampled ids to the calls in them. ``template``: the chat template; ``opening``: a
    prompt as it writes it, up to where a reply begins. Raises PlanError for a family of models whose calls
    are not known."""
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
    """Whether transformers parses what models with this tokenizer say."""
    return any(getattr(tokenizer, name, None) for name in PARSERS)


def calls_pattern(template: str, folder: object) -> re.Pattern[str]:
    """How models whose chat template is ``template`` write calls. Raises PlanError where that is not
    known."""
    pattern = next((pattern for mark, pattern in MARKS.items() if mark in template), None)
    if pattern is None:
        raise PlanError.of(
            "env-tools",
            f"how models of {folder} write a call of a tool is not known",
            found="a chat template without a mark of calls",
            expected=f"a {PARSERS[0]} of the tokenizer, or one of {', '.join(MARKS)} in its template",
            remedy="name a model that was trained to call tools, or write an environment with step",
        )
    return pattern


def parsed(text: str) -> Iterator[ToolCall]:
    """The calls that JSON describes: an object with name and arguments, or a list of such."""
    try:
        value, _ = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError) as error:
        yield ToolCall("", {}, f"the call is no JSON: {error}")
        return
    for each in value if isinstance(value, list) else [value]:
        yield _call(mended(each)[0])


def _call(value: Any) -> ToolCall:
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return ToolCall("", {}, "a call is an object with the name of a tool and its arguments")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments, _ = mended(json.loads(arguments))
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, Mapping):
        return ToolCall(value["name"], {}, f"the arguments of {value['name']} are no object")
    return ToolCall(value["name"], dict(arguments))


def _by_tokenizer(tokenizer: Any, ids: Sequence[int], more: Mapping[str, Any]) -> Iterator[ToolCall]:
    try:
        message = tokenizer.parse_response(tokenizer.decode(list(ids), skip_special_tokens=False), **more)
    except Exception as error:  # the template is the model's own
        yield ToolCall("", {}, f"{type(error).__name__}: {error}")
        return
    for each in (message.get("tool_calls") or ()) if isinstance(message, Mapping) else ():
        yield _call(mended(each.get("function", each) if isinstance(each, Mapping) else each)[0])
