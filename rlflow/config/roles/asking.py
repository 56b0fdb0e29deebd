"""Encode follow-up prompts and responses with the tokenizer and chat template of a role."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rlflow.author.messages import is_plain
from rlflow.author.node_options import AskOptions
from rlflow.compiler.graph.model import Graph, used_nodes
from rlflow.config.flags import RunConfig
from rlflow.config.roles.bound import Roles
from rlflow.config.roles.environments import by_role
from rlflow.config.roles.opened_data import true_or_false
from rlflow.config.roles.prompt_room import most_tokens
from rlflow.config.roles.tool_prompts import encoder_with_tools
from rlflow.config.template_kwargs import template_kwargs
from rlflow.data.encode import ByteEncoder, Encoder, TokenizerEncoder, Wording
from rlflow.data.turns import joined
from rlflow.errors import PlanError, listed
from rlflow.execution.follow_ups import Asked, Asking, Reply
from rlflow.rewards.environments.environment_spec import EnvironmentSpec

# files that determine token ids
TOKENIZER = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "chat_template.jinja",
    "tokenizer_config.json",
)


def asking(
    graph: Graph,
    roles: Roles,
    config: RunConfig,
    environments: Mapping[str, EnvironmentSpec] = MappingProxyType({}),
) -> Asking:
    """Return the functions that encode follow-up prompts and environment messages and parse tool calls.

    Follow-up prompts use the same system message and chat format as prompts from the data, but not
    ``--data.template``. If a role's environment has tools, its prompts describe them. Raises PlanError if
    roles with different tokenizers answer the same follow-up prompts.
    """
    environment = by_role(environments, graph)
    tools = {role: spec for role, spec in environment.items() if spec.tools}
    folders = {name: role.folder for name, role in roles.items()}
    for node in used_nodes(graph):
        if isinstance(node.settings, AskOptions):
            _alike(node.settings.roles, folders)
    default = config.tokenizer_folder
    encoders = _Encoders(folders, Path(default) if default else None, environment, tools, config.data)
    for role in tools:
        encoders.of((role,))  # raises for a template without tools, before any model is loaded
    longest = config.data.get("max_prompt")
    return Asking(
        encoders.encode,
        encoders.follow,
        encoders.speak,
        encoders.reply,
        encoders.decode,
        encoders.calls,
        math.inf if longest is None else int(longest),
        most_tokens(roles),
    )


class _Encoders:
    """Encodes and decodes text for roles, each with its own tokenizer. See ``Asking`` for the methods."""

    def __init__(
        self,
        folders: Mapping[str, Path | None],
        default: Path | None,
        environments: Mapping[str, EnvironmentSpec],
        tools: Mapping[str, EnvironmentSpec],
        data: Mapping[str, Any],
    ) -> None:
        self._folders, self._default = folders, default
        self._environments, self._tools = environments, tools
        self._variables = template_kwargs(data)
        self._chat, self._system = data.get("chat"), data.get("system")
        self._made: dict[tuple[Path | None, str], tuple[Encoder, Wording]] = {}

    def of(self, names: tuple[str, ...]) -> tuple[Encoder, Wording]:
        """Return the encoder for these roles and the wording of their prompts. Raises PlanError."""
        folder = next(
            (own for name in names if (own := self._folders.get(name)) is not None),
            self._default,
        )
        key = folder, next((name for name in names if name in self._tools), "")
        if key not in self._made:
            self._made[key] = self._encoder(*key)
        return self._made[key]

    def _encoder(self, folder: Path | None, role: str) -> tuple[Encoder, Wording]:
        plain: Encoder = TokenizerEncoder(folder, self._variables) if folder is not None else ByteEncoder()
        telling = encoder_with_tools(plain, self._tools[role]) if role in self._tools else plain
        chats = telling.chats if self._chat is None else true_or_false("chat", self._chat)
        return telling, Wording(chats, str(self._system) if chats and self._system is not None else None)

    def encode(self, names: tuple[str, ...], texts: Sequence[Asked]) -> list[list[int]]:
        tokenizer, wording = self.of(names)
        _refuse_messages(tokenizer, names, texts)
        return tokenizer.asked(texts, wording)

    def follow(
        self, names: tuple[str, ...], texts: Sequence[Asked], sampled: Sequence[Sequence[int]]
    ) -> list[list[int]]:
        tokenizer, wording = self.of(names)
        _refuse_messages(tokenizer, names, texts)
        return tokenizer.following(texts, sampled, wording)

    def speak(
        self, names: tuple[str, ...], texts: Sequence[Asked], sampled: Sequence[Sequence[int]]
    ) -> list[list[int]]:
        tokenizer, wording = self.of(names)
        _refuse_messages(tokenizer, names, texts)
        allowed = any(
            spec.bounds.control_tokens == "allow"
            for name in names
            if (spec := self._environments.get(name)) is not None
        )
        return tokenizer.following(texts, sampled, replace(wording, chat=False), allowed)

    def reply(self, names: tuple[str, ...], texts: Sequence[Asked]) -> list[Reply]:
        tokenizer, wording = self.of(names)
        _refuse_messages(tokenizer, names, texts, "responses")
        plain = [_reply(text) for text in texts]
        return [joined(turns) for turns in tokenizer.replies(plain, wording)]

    def decode(self, names: tuple[str, ...], rows: Sequence[Sequence[int]], bare: bool = False) -> list[str]:
        return self.of(names)[0].texts(rows, bare)

    def calls(self, names: tuple[str, ...], rows: Sequence[Sequence[int]]) -> list[list[Any]]:
        return [list(self.of(names)[0].calls(row)) for row in rows]


def _refuse_messages(
    tokenizer: Encoder, names: tuple[str, ...], texts: Sequence[Asked], what: str = "follow-up prompts"
) -> None:
    """Raise PlanError if the texts are chat messages but the tokenizer has no chat template.

    ``what``: what the texts are, for the message.
    """
    messages = next((text for text in texts if not isinstance(text, str)), None)
    if messages is not None and isinstance(tokenizer, TokenizerEncoder) and not tokenizer.chats:
        raise PlanError.of(
            "asked-chat",
            f"{what} are messages, but the tokenizer of {tokenizer.folder} has no chat template",
            found=repr(messages)[:80],
            expected=f"a chat template for {listed(names)}",
            remedy="use an instruct model, whose tokenizer has one, or let the stage return text",
        )


def _reply(text: Asked) -> Asked:
    """Return a response as text if it is a single plain message.

    Raises ValueError for messages that don't begin and end with the assistant.
    """
    if isinstance(text, str):
        return text
    if {text[0]["role"], text[-1]["role"]} != {"assistant"}:
        raise ValueError(
            f"encode: found messages of {listed(message['role'] for message in text)}, expected a response, "
            "which begins and ends with the assistant"
        )
    return text[0]["content"] if len(text) == 1 and is_plain(text[0]) else text


def _alike(names: Sequence[str], folders: Mapping[str, Path | None]) -> None:
    """Raise PlanError if the roles in ``names`` have different tokenizers.

    ``folders``: the model folder of each role.
    """
    known = {name: _digest(folder) for name in names if (folder := folders.get(name)) is not None}
    if len(set(known.values())) > 1:
        raise PlanError.of(
            "asked-tokenizers",
            "roles with different tokenizers sample from the same follow-up prompts",
            found=listed(f"{name}: {folders[name]}" for name in known),
            expected="one tokenizer",
            remedy="ask once for each role: ask(batch, column) before each generate",
        )


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for name in TOKENIZER:
        digest.update(name.encode() + ((folder / name).read_bytes() if (folder / name).is_file() else b""))
    return digest.hexdigest()
