"""Models are told of the tools of their environment in the prompts of the data, by the chat template."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rlflow.compiler.graph.model import Graph
from rlflow.config.folders import model_folder
from rlflow.config.roles.environments import Specs, by_role
from rlflow.data.encode import Encoder, TokenizerEncoder
from rlflow.data.tool_template import check_folder
from rlflow.errors import PlanError, Problem
from rlflow.rewards.environments.environment_spec import EnvironmentSpec

if TYPE_CHECKING:
    from rlflow.data.dataset import Dataset


def with_tools_of(specs: Specs) -> EnvironmentSpec | None:
    """The environment of whose tools models are told in the prompts of the data; None where none has
    tools."""
    return next((spec for spec in specs.values() if spec.tools), None)


def schemas(spec: EnvironmentSpec) -> list[Mapping[str, Any]]:
    """The JSON schemas of an environment's tools."""
    return [tool.schema for tool in spec.tools]


def with_tools(data: Dataset, spec: EnvironmentSpec | None) -> Encoder:
    """The encoder of a data set, which tells models of an environment's tools. Raises PlanError for prompts
    that go through no chat template, and for a template that cannot carry tools."""
    if spec is None:
        return data.encoder
    telling = told_of_tools(data.encoder, spec)
    plain = [record for record in data.records[:1] if isinstance(record.prompt, str)]
    if plain and not data.wording.chat and isinstance(data.encoder, TokenizerEncoder):
        raise PlanError.of(
            "env-tools",
            "tools are told of by the chat template, through which no prompt goes",
            place=spec.place,
            found="--data.chat false",
            expected="prompts that go through it",
            remedy="--data.chat true",
        )
    return telling


def told_of_tools(encoder: Encoder, spec: EnvironmentSpec | None) -> Encoder:
    """An encoder that tells models of an environment's tools, if there is one. Raises PlanError for a
    template that cannot carry them."""
    if spec is None:
        return encoder
    try:
        return encoder.with_tools(schemas(spec))
    except PlanError as error:
        raise PlanError(*_at(spec, error)) from error


def template_problems(
    graph: Graph,
    default: str | None,
    own: Mapping[str, str],
    specs: Specs,
    variables: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[Problem]:
    """Problems of the model folders of roles whose environments have tools, by the folders' files: no
    tokenizer is loaded. A run finds them as it opens its data. ``default``: the folder whose tokenizer
    encodes the data; ``own``: those of roles that name one;
    ``variables``: those of the chat template."""
    for role, spec in by_role(specs, graph).items():
        for folder in dict.fromkeys(filter(None, (default, own.get(role)))) if spec.tools else ():
            try:
                check_folder(
                    model_folder(str(folder), f"--model or --{role}.model"), schemas(spec), variables
                )
            except PlanError as error:
                yield from _at(spec, error)


def _at(spec: EnvironmentSpec, error: PlanError) -> Iterator[Problem]:
    """The problems of an error, at the class whose tools they are about."""
    yield from (replace(problem, place=problem.place or spec.place) for problem in error.problems)
