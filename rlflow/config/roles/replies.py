"""Check how replies end and how later turns follow them, using only files in model folders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from rlflow.author.node_options import AskOptions, EncodeOptions, GenerateOptions
from rlflow.compiler.graph.model import Graph, Node, used_nodes
from rlflow.compiler.trace.compile import Program
from rlflow.config.roles.environments import Specs, by_role, sampling_roles
from rlflow.data.chat import QUESTION, ChatTemplate, check_variables
from rlflow.data.controls import unwritable
from rlflow.data.ends import NONE, Variables, ends_of, template_of
from rlflow.errors import PlanError, Problem, listed
from rlflow.rewards.environments.environment_spec import EnvironmentSpec
from rlflow.training import pretrained

Folders = Mapping[str, str | Path | None]  # by role


def reply_problems(
    graph: Graph,
    default: str | Path | None,
    own: Folders,
    specs: Specs = MappingProxyType({}),
    chat: bool = True,
    variables: Variables = NONE,
) -> Iterator[Problem]:
    """Yield problems in model folders that affect how a reply ends or what follows it.

    These are files that disagree about end tokens, templates that can't continue after a reply, and
    tokenizers that can't encode text from an environment or an `ask`.

    ``default``: the folder of the tokenizer that encodes the data. ``own``: the folder of each role that has
    its own. ``specs``: environments by role. ``chat``: whether text goes through the chat template, if there
    is one. ``variables``: the template's variables, besides messages.
    """
    folders = [default, *(own.get(role) for role in sampling_roles(graph))]
    for each in dict.fromkeys(Path(folder).absolute() for folder in folders if folder is not None):
        yield from ends_of(each, variables).problems
    yield from _variable_problems(default, variables)
    asks = {role: node for node in used_nodes(graph) if chat and (role := _goes_on(node))}
    environments = by_role(specs, graph)
    for role in dict.fromkeys([*environments, *asks]):
        folder = own.get(role) or default
        template = template_of(Path(folder).absolute(), variables) if folder is not None else None
        if template is not None:
            yield from _turn_problems(template, environments.get(role), asks.get(role))
    yield from _control_problems(graph, default, own, environments)


def stop_problems(program: Program, default: str | Path | None, own: Folders) -> Iterator[Problem]:
    """Yield a problem for each call with ``stop_token_ids`` that the model's vocabulary doesn't have.

    For ``default`` and ``own``, see ``reply_problems``.
    """
    for node in used_nodes(program.graph):
        ids = node.settings.stop_token_ids if isinstance(node.settings, GenerateOptions) else ()
        folder = own.get(node.role or "") or default
        size = pretrained.read_vocabulary_size(Path(folder)) if ids and folder is not None else None
        unknown = [str(token) for token in ids if size is not None and token >= size]
        if size is not None and unknown:
            flag = f"--{node.role}.generate.stop_token_ids"
            yield Problem(
                "stop-token",
                f"'{node.name}' has stop tokens that the model in {folder} does not have",
                node.place,
                found=f"{flag} {', '.join(unknown)}",
                expected=f"ids from 0 to {size - 1}",
                remedy=f"correct {flag}",
            )


def _variable_problems(default: str | Path | None, variables: Variables) -> Iterator[Problem]:
    """Yield problems with the variables that the run sets for the data's chat template.

    ``default``: the folder of the tokenizer that encodes the data.
    """
    template = template_of(Path(default).absolute()) if default is not None and variables else None
    try:
        check_variables(variables, template)
    except PlanError as error:
        yield from error.problems


def _answering_roles(node: Node) -> tuple[str, ...]:
    """Return the roles that answer an `ask` node's prompts, or none for other nodes."""
    return node.settings.roles if isinstance(node.settings, AskOptions) else ()


def _text_roles(node: Node) -> tuple[str, ...]:
    """Return the roles for which an `ask` or `encode` node encodes text, or none for other nodes."""
    return node.settings.roles if isinstance(node.settings, AskOptions | EncodeOptions) else ()


def _goes_on(node: Node) -> str:
    """Return the role whose chat an `ask` node continues, or "" if the node starts a new chat."""
    return (
        next(iter(_answering_roles(node)), "")
        if {"text", "tokens"} <= {each.parameter for each in node.inputs}
        else ""
    )


def _control_problems(
    graph: Graph, default: str | Path | None, own: Folders, environments: Mapping[str, EnvironmentSpec]
) -> Iterator[Problem]:
    """Yield a warning for each tokenizer that can't encode the text of a control token as ordinary tokens.

    Only tokenizers for text from environments, an `ask` or an `encode` are checked. ``environments``: by role.
    """
    places = {role: node.place for node in used_nodes(graph) for role in _text_roles(node)}
    places |= {
        role: spec.place for role, spec in environments.items() if spec.bounds.control_tokens == "text"
    }
    folders = {
        Path(folder).absolute(): place
        for role, place in places.items()
        if (folder := own.get(role) or default) is not None
    }
    for folder, place in folders.items():
        if held := unwritable(folder):
            yield Problem(
                "control-tokens",
                f"the tokenizer of {folder} has no ordinary tokens for the text of control tokens: a run "
                "ends as soon as an environment, a tool, `ask` or `encode` returns such a text",
                place,
                found=listed(held, 4),
                expected="a tokenizer with ordinary tokens for each character",
                remedy="use another model; if an environment may write control tokens, --env.control_tokens "
                "allow; if such a text never occurs, nothing is needed",
                severity="warning",
            )


def _turn_problems(
    template: ChatTemplate, spec: EnvironmentSpec | None, ask: Node | None
) -> Iterator[Problem]:
    """Yield problems with turns that an environment or an `ask` adds after a reply.

    If the template doesn't allow any, an environment only gets a warning, because it can append plain text
    instead.
    """
    question = {"role": "user", "content": QUESTION}
    place = ask.place if ask is not None else spec.place if spec is not None else None
    try:
        template.after_reply([question], [[question]])
    except PlanError as error:
        if spec is not None and spec.tools:
            return  # the check of tools reports it
        without_invalid_characters = (
            "let the environment write plain text, which is appended unchanged, or use a model whose "
            "template keeps earlier turns unchanged"
        )
        text = {} if ask is not None else {"severity": "warning", "remedy": without_invalid_characters}
        yield from (replace(problem, place=place, **text) for problem in error.problems)  # type: ignore[arg-type]
        return
    if dropped := template.dropped():
        yield Problem(
            "turns-kept",
            f"the chat template of {template.folder} drops {dropped} when later turns follow; rows keep it "
            "as sampled",
            place,
            severity="note",
        )
