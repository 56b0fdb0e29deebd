"""Models are told of the tools of their environment in the prompts of the data, by the chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlflow.binding.environments import Specs
from rlflow.data.dataset import Dataset
from rlflow.data.encode import Encoder, TokenizerEncoder
from rlflow.errors import PlanError


def tools_of(specs: Specs) -> list[Mapping[str, Any]]:
    """The JSON schemas of the tools that models are told of in the prompts of the data."""
    return next(([tool.schema for tool in spec.tools] for spec in specs.values() if spec.tools), [])


def with_tools(data: Dataset, tools: Sequence[Mapping[str, Any]]) -> Encoder:
    """The encoder of a data set, which tells models of tools. Raises PlanError for prompts that go through no chat template."""
    if tools and isinstance(data.encoder, TokenizerEncoder) and not data.encoder.chats:
        raise PlanError.of("env-tools", f"tools are told of by a chat template, and the tokenizer of {data.encoder.folder} has none",
                           found="prompts that are plain text", expected="a model with a chat template that takes tools",
                           remedy="name an instruct model, or write an environment with step")
    plain = [record for record in data.records[:1] if isinstance(record.prompt, str)]
    if tools and plain and not data.wording.chat and isinstance(data.encoder, TokenizerEncoder):
        raise PlanError.of("env-tools", "tools are told of by the chat template, through which no prompt goes", found="--data.chat false",
                           expected="prompts that go through it", remedy="--data.chat true")
    return data.encoder.with_tools(tools) if tools else data.encoder
