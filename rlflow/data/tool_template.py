"""Checks that a model's chat template can describe tools and their answers.

The template is rendered without loading the model, so `rlflow check` finds errors before a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rlflow.data.chat import QUESTION, ChatTemplate
from rlflow.data.tool_calls import calls_pattern
from rlflow.errors import PlanError
from rlflow.training import pretrained

RESULT = "result"  # placeholder for a tool's answer
REMEDY = "use a model that was trained to call tools, or write an environment with step"


def check_template(template: ChatTemplate, tools: Sequence[Mapping[str, Any]], parses: bool) -> str:
    """Check a chat template. Return a sample prompt with a description of the tools, up to the reply.

    ``template``: a template with the tools among its variables. ``parses``: True if the model's tokenizer can
    parse tool calls. Raises PlanError if the template doesn't describe the tools, doesn't write their
    answers, or changes earlier turns after a tool's answer, or if the format of the model's tool calls is
    unknown.
    """
    question = {"role": "user", "content": QUESTION}
    (opening,) = template.render([[question]])
    missing = [tool["function"]["name"] for tool in tools if tool["function"]["name"] not in opening]
    if missing:
        raise PlanError.of(
            "env-tools",
            f"the chat template of {template.folder} does not describe tools",
            found=f"no {missing[0]} in it",
            expected="a template that accepts tools",
            remedy=REMEDY,
        )
    (between,) = template.after_reply([question], [[{"role": "tool", "content": RESULT}]])
    if RESULT not in between:
        raise PlanError.of(
            "env-tools",
            f"the chat template of {template.folder} does not write a tool's answer",
            found=repr(between),
            expected="a turn with the content of messages with the role tool",
            remedy=REMEDY,
        )
    if not parses:
        calls_pattern(template.text, template.folder)
    return opening


def check_folder(
    folder: Path, tools: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Check the chat template in a model folder's files, as ``check_template`` does.

    ``variables``: additional variables of the template. Raises the same errors as ``check_template``, and
    PlanError if there is no template.
    """
    templates = pretrained.read_templates(folder)
    if not templates:
        raise no_template(folder)
    text = templates.get(pretrained.TOOL_TEMPLATE) or templates.get(pretrained.DEFAULT_TEMPLATE)
    # If there are several templates and none has a known name, none is used; loading the tokenizer reports
    # this.
    if text is not None:
        given = {**pretrained.read_special_tokens(folder), **variables, "tools": list(tools)}
        check_template(ChatTemplate(folder, text, given), tools, pretrained.parses_responses(folder))


def no_template(folder: Path) -> PlanError:
    """Return the error for a model folder without a chat template."""
    return PlanError.of(
        "env-tools",
        f"tools require a chat template, and the tokenizer of {folder} has none",
        found="prompts that are plain text",
        expected="a model with a chat template that accepts tools",
        remedy="use an instruct model with --model, or write an environment with step",
    )
