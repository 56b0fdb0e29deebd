"""Describe an environment's tools in prompts from the data, using the chat template."""

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
    """Return the environment whose tools the data's prompts describe, or None if no environment has any."""
    return next((spec for spec in specs.values() if spec.tools), None)


def schemas(spec: EnvironmentSpec) -> list[Mapping[str, Any]]:
    """Return the JSON schemas of an environment's tools."""
    return [tool.schema for tool in spec.tools]


def with_tools(data: Dataset, spec: EnvironmentSpec | None) -> Encoder:
    """Return the data set's encoder, with prompts that describe an environment's tools.

    If there is no environment, the encoder is returned unchanged. Raises PlanError if prompts don't use a
    chat template, or if the template can't describe tools.
    """
    if spec is None:
        return data.encoder
    telling = encoder_with_tools(data.encoder, spec)
    plain = [record for record in data.records[:1] if isinstance(record.prompt, str)]
    if plain and not data.wording.chat and isinstance(data.encoder, TokenizerEncoder):
        raise PlanError.of(
            "env-tools",
            "tools are listed by the chat template, but prompts do not use it",
            place=spec.place,
            found="--data.chat false",
            expected="prompts that use the chat template",
            remedy="--data.chat true",
        )
    return telling


def encoder_with_tools(encoder: Encoder, spec: EnvironmentSpec | None) -> Encoder:
    """Return the encoder, with prompts that describe an environment's tools.

    If there is no environment, the encoder is returned unchanged. Raises PlanError if the template can't
    describe tools.
    """
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
    """Yield problems in the model folders of roles whose environments have tools.

    This reads files without loading a tokenizer, so problems are found before a run opens its data.
    ``default``: the folder of the tokenizer that encodes the data. ``own``: the folder of each role that has
    its own. ``variables``: the chat template's variables.
    """
    for role, spec in by_role(specs, graph).items():
        for folder in dict.fromkeys(filter(None, (default, own.get(role)))) if spec.tools else ():
            try:
                check_folder(
                    model_folder(str(folder), f"--model or --{role}.model"), schemas(spec), variables
                )
            except PlanError as error:
                yield from _at(spec, error)


def _at(spec: EnvironmentSpec, error: PlanError) -> Iterator[Problem]:
    """Yield an error's problems, placing those without a place at the environment's class."""
    yield from (replace(problem, place=problem.place or spec.place) for problem in error.problems)
