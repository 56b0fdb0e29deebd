"""Whether the chat template of a model can tell it of tools and write what they answer. A template is
rendered, and nothing of the model is
loaded: so `rlflow check` says what a run would refuse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rlflow.data.chat import QUESTION, ChatTemplate
from rlflow.data.tool_calls import calls_pattern
from rlflow.errors import PlanError
from rlflow.training import pretrained

RESULT = "result"  # what stands for any answer of a tool
REMEDY = "name a model that was trained to call tools, or write an environment with step"


def check_template(template: ChatTemplate, tools: Sequence[Mapping[str, Any]], parses: bool) -> str:
    """The text with which a question begins that tells of tools. ``template``: with the tools among its
    variables; ``parses``: whether the model's tokenizer says how calls are parsed. Raises PlanError for a
    template that does not tell of the tools, or does not write what they answer, or writes earlier turns
    otherwise once a tool has answered, and for a model whose calls are not known."""
    question = {"role": "user", "content": QUESTION}
    (opening,) = template.render([[question]])
    missing = [tool["function"]["name"] for tool in tools if tool["function"]["name"] not in opening]
    if missing:
        raise PlanError.of(
            "env-tools",
            f"the chat template of {template.folder} says nothing of tools",
            found=f"no {missing[0]} in it",
            expected="a template that takes tools",
            remedy=REMEDY,
        )
    (between,) = template.after_reply([question], [[{"role": "tool", "content": RESULT}]])
    if RESULT not in between:
        raise PlanError.of(
            "env-tools",
            f"the chat template of {template.folder} does not write what a tool answers",
            found=repr(between),
            expected="a next turn with the content of messages of the role tool",
            remedy=REMEDY,
        )
    if not parses:
        calls_pattern(template.text, template.folder)
    return opening


def check_folder(
    folder: Path, tools: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Judge the template of a model folder by its files. ``variables``: those that it is given beside
    messages. Raises PlanError as ``check_template`` does, and where there is no template."""
    templates = pretrained.read_templates(folder)
    if not templates:
        raise no_template(folder)
    text = templates.get(pretrained.TOOL_TEMPLATE) or templates.get(pretrained.DEFAULT_TEMPLATE)
    # of several without a name that is known none is chosen, which the tokenizer's own error tells
    if text is not None:
        given = {**pretrained.read_special_tokens(folder), **variables, "tools": list(tools)}
        check_template(ChatTemplate(folder, text, given), tools, pretrained.parses_responses(folder))


def no_template(folder: Path) -> PlanError:
    """The refusal of a model without a chat template."""
    return PlanError.of(
        "env-tools",
        f"tools are told of by a chat template, and the tokenizer of {folder} has none",
        found="prompts that are plain text",
        expected="a model with a chat template that takes tools",
        remedy="name an instruct model with --model, or write an environment with step",
    )
