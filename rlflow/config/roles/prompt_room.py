"""Work out how long rows can be, given the models of a run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlflow.author.node_options import EncodeOptions, GenerateOptions
from rlflow.compiler.graph.model import Graph, Node, Op, used_nodes
from rlflow.config.roles.bound import Roles
from rlflow.data.dataset import Dataset
from rlflow.data.faults import Room
from rlflow.errors import PlanError
from rlflow.rewards.reward_spec import parse_reward
from rlflow.training import pretrained
from rlflow.training.pretrained import Boundary

NAMES = ("max_position_embeddings", "n_positions", "max_seq_len")  # keys of the maximum length
# rotary embedding types that extend the longest row by a factor
STRETCHED = ("linear", "dynamic", "yarn")


def room(graph: Graph, roles: Roles, rewards: Iterable[str], responses: bool) -> Room:
    """Return how many tokens prompts and rows can have, given the models of a run.

    If the flow samples, prompts must leave room for the sampled tokens. If the data has responses
    (``responses``), whole rows are limited too. ``rewards``: the values of ``--reward``. Raises PlanError if
    the sampled tokens leave no room for a prompt.
    """
    shortest = min(_limits(roles, rewards), default=None)
    if shortest is None:
        return Room()
    positions, whose = shortest
    of = f"{positions} positions of {whose}"
    sampled = max((node for node in used_nodes(graph) if node.op is Op.GENERATE), key=_tokens, default=None)
    if sampled is None:
        return Room(None, positions if responses else None, f" ({of})")
    prompt = positions - _tokens(sampled)
    if prompt < 1:
        raise _no_room(graph, sampled, of, positions)
    return Room(
        prompt,
        positions if responses else None,
        f" ({of}, of which {sampled.name} may sample {_tokens(sampled)})",
    )


def _tokens(node: Node) -> int:
    return node.options(GenerateOptions).max_tokens


def _no_room(graph: Graph, node: Node, of: str, positions: int) -> PlanError:
    tokens = _tokens(node)
    setting = next(
        (name for name, value in graph.hp if value == tokens and not isinstance(value, bool)), None
    )
    flag = f"--hp.{setting} {positions // 2}" if setting else f"max_tokens={positions // 2} in {node.name}"
    return PlanError.of(
        "no-room",
        f"'{node.name}' may sample {tokens} tokens, which leaves no room for a prompt",
        place=node.place,
        found=f"max_tokens={tokens}, {of}",
        expected=f"fewer than {positions} tokens",
        remedy=f"sample fewer, such as {flag}",
    )


def most_tokens(roles: Roles) -> float:
    """Return how many tokens a row can have, given the models of the roles. Infinity if none has a limit."""
    return min((limit for limit, _ in _limits(roles, ())), default=math.inf)


def _limits(roles: Roles, rewards: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Yield (maximum tokens in a row, name) for each model that has such a limit.

    These are the models of roles, their inference engines, and reward models with folders of their own.
    """
    for name, role in roles.items():
        if role.folder is not None and {half.backend for half in role.sides} != {"null"}:
            limits = {
                positions_of(role.folder): f"role '{name}'",
                role.generator.can.longest: f"role '{name}' (max_model_len)",
            }
            yield from ((limit, whose) for limit, whose in limits.items() if limit)
    for spec in map(parse_reward, rewards):
        if spec.kind == "model" and (limit := positions_of(Path(spec.path))):
            yield limit, f"reward '{spec.name}'"


def boundaries(folder: Path | None) -> list[Boundary]:
    """Return the row lengths at which a model's rotary frequencies change. Most models have none.

    ``folder``: the model folder, or None for no model.
    """
    try:
        return (
            list(pretrained.length_boundaries(pretrained.read_config(folder)).values())
            if folder is not None
            else []
        )
    except (OSError, ValueError, KeyError, PlanError):
        return []  # loading the model reports the error


def longest_row(graph: Graph, datasets: Iterable[Dataset], max_prompt: int | None) -> int:
    """Return an upper bound for the tokens in a row of this run, including its prompt.

    Returns 0 if follow-up prompts or encoded responses have no length limit. ``max_prompt``: the maximum number of tokens in a
    follow-up prompt.
    """
    nodes = list(used_nodes(graph))
    asks = any(node.op is Op.ASK for node in nodes)
    if asks and max_prompt is None:
        return 0
    encoded = [node.settings.max_tokens for node in nodes if isinstance(node.settings, EncodeOptions)]
    if None in encoded:
        return 0
    known = [data.longest() for data in datasets]
    prompt = max((max_prompt or 0) if asks else 0, *(own for own, _ in known))
    row = max(row for _, row in known)
    # without sampling, an evaluation may sample as many tokens as the longest response has
    sampled = max((_tokens(node) for node in nodes if node.op is Op.GENERATE), default=row - prompt + 1)
    return max(row, prompt + sampled, *(prompt + tokens for tokens in encoded if tokens is not None))


def positions_of(folder: Path) -> int | None:
    """Return how many tokens per row a model supports, or None if its configuration doesn't say."""
    # If the configuration is damaged, loading the model reports the error.
    config = pretrained.read_object(folder / pretrained.CONFIG)
    text = own if isinstance(own := config.get("text_config"), dict) and own else config
    longest = next((text[name] for name in NAMES if isinstance(text.get(name), int) and text[name] > 0), None)
    return None if longest is None else max(longest, _stretched(text, longest))


def _stretched(config: Mapping[str, Any], longest: int) -> int:
    """Return how many tokens per row a model supports with the scaling of its rotary embeddings.

    ``longest``: the maximum in the configuration, which may be the one before scaling.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(rope, Mapping) or rope.get("rope_type", rope.get("type")) not in STRETCHED:
        return longest
    factor, original = rope.get("factor", 1.0), rope.get("original_max_position_embeddings", longest)
    if not all(isinstance(number, int | float) and math.isfinite(number) for number in (factor, original)):
        return longest
    return int(factor * original)
