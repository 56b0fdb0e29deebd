"""From a prompt to token ids: the wording (template, system line, chat template), then the model's tokenizer
or plain bytes."""

from __future__ import annotations

import copy
import os
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from rlflow.author.messages import Message, ToolCall, is_plain, text_of
from rlflow.data.chat import QUESTION, REPLY, ChatTemplate, check_variables
from rlflow.data.controls import Controls, StandIns
from rlflow.data.ends import Ends, ends_of
from rlflow.data.fields import Record
from rlflow.data.spoken import completions
from rlflow.data.tool_calls import calls_by, parses_itself
from rlflow.data.tool_template import check_template, no_template
from rlflow.data.turns import Turn, divided
from rlflow.errors import PlanError, listed
from rlflow.training import pretrained

END = 256  # id of the byte encoding's end of text


@dataclass(frozen=True)
class Wording:
    """How a prompt is put to the model. Prompts that are lists of messages go through the tokenizer's chat
    template."""

    # whether a prompt that is text goes through the chat template too, as a user's message
    chat: bool = False
    system: str | None = None  # a system message before conversations that do not begin with one
    template: str | None = None  # text around a plain prompt, such as "Q: {prompt}\\nA:"
    # variables that the encoder gives the chat template beside messages
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.template is not None:
            _check_template(self.template)

    def of(self, record: Record) -> str | list[Message]:
        """The record's prompt as a text or as messages. Raises PlanError for a setting that cannot be applied
        to this kind of prompt."""
        if not isinstance(record.prompt, str):
            if self.template is not None:
                raise _no_use("template", "its prompts are lists of messages")
            return [*(self._system() if record.prompt[0]["role"] != "system" else []), *record.prompt]
        text = self.template.format(prompt=record.prompt) if self.template is not None else record.prompt
        if self.chat:
            return [*self._system(), {"role": "user", "content": text}]
        if self.system is not None:
            raise _no_use("system", "its prompts are plain text and chat is off")
        if self.template_kwargs:
            raise _no_use("template_kwargs", "its prompts are plain text and chat is off")
        return text

    def _system(self) -> list[Message]:
        return [{"role": "system", "content": self.system}] if self.system is not None else []


def _check_template(template: str) -> None:
    try:
        names = [
            f"{name}{form}{conversion or ''}"
            for _, name, form, conversion in string.Formatter().parse(template)
            if name is not None
        ]
    except ValueError as error:
        names = [str(error)]
    if set(names) != {"prompt"}:  # no width either, which could be of any size
        raise PlanError.of(
            "data-template",
            "the template must name {prompt} and nothing else",
            found=repr(template),
            expected="{prompt}",
            remedy="write other braces twice: \\boxed{{}}",
        )


def _no_use(setting: str, why: str) -> PlanError:
    return PlanError.of(
        "data-wording",
        f"'{setting}' has no effect on this data: {why}",
        found=setting,
        expected=f"no '{setting}'",
        remedy="leave it out, or set chat = true for prompts that are text and a model with a chat template",
    )


class Encoder(Protocol):
    """Turns worded prompts and responses into token ids."""

    chats: bool  # whether it has a chat template

    @property
    def longest(self) -> int:
        """The most characters that one token stands for."""

    def worded(self, wordings: Sequence[str | list[Message]]) -> list[str]:
        """The text of each prompt as the model reads it; messages go through the chat template."""

    def prompts(self, wordings: Sequence[str | list[Message]]) -> list[list[int]]:
        """The token ids of each prompt, a text or messages."""

    def asked(self, texts: Sequence[str | list[Message]], wording: Wording) -> list[list[int]]:
        """The token ids of each prompt that was made of what models or others said. No control token comes of
        what they said."""

    def responses(self, texts: Sequence[str], chat: bool = True) -> list[list[int]]:
        """The token ids of each response, with the token that ends it: after a prompt that is a chat, or
        after plain text."""

    def turns(self, wording: str | list[Message], response: Sequence[Message]) -> list[Turn]:
        """The token ids of a response of several turns to a prompt, turn by turn."""

    def following(
        self,
        texts: Sequence[str | list[Message]],
        sampled: Sequence[Sequence[int]],
        wording: Wording,
        controls: bool = False,
    ) -> list[list[int]]:
        """The token ids of each text as another turn after sampled ids, or of messages as further turns.
        ``controls``: whether control tokens that they hold become such."""

    def texts(self, rows: Sequence[Sequence[int]], bare: bool = False) -> list[str]:
        """The text of each row of token ids, without padding and what ends it. bare: without the special
        tokens inside it either."""

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> Encoder:
        """A copy that tells models of tools, by their JSON schemas."""

    def calls(self, ids: Sequence[int]) -> list[ToolCall]:
        """The calls of tools in sampled ids."""


class ByteEncoder:
    """Uses UTF-8 bytes as token ids, and END after a response. It serves runs without a model."""

    chats = False
    longest = 1

    def worded(self, wordings: Sequence[str | list[Message]]) -> list[str]:
        """The text of each prompt; messages are written one on a line, with their roles."""
        return [_plain(item) for item in wordings]

    def prompts(self, wordings: Sequence[str | list[Message]]) -> list[list[int]]:
        """The bytes of each prompt's text."""
        return [list(text.encode()) for text in self.worded(wordings)]

    def asked(self, texts: Sequence[str | list[Message]], wording: Wording) -> list[list[int]]:
        """The bytes of each text; END stands for none."""
        return self.prompts(_worded(texts, wording))

    def responses(self, texts: Sequence[str], chat: bool = True) -> list[list[int]]:
        """The bytes of each response, and END."""
        return [[*text.encode(), END] for text in texts]

    def turns(self, wording: str | list[Message], response: Sequence[Message]) -> list[Turn]:
        """The bytes of the assistant's turns and of what stands between them."""
        turns: list[Turn] = []
        for context, message in divided(response):
            turns += [(list(f"\n{_plain(context)}".encode()), False)] if turns else []
            turns.append((self.responses([text_of(message)])[0], True))
        return turns

    def following(
        self,
        texts: Sequence[str | list[Message]],
        sampled: Sequence[Sequence[int]],
        wording: Wording,
        controls: bool = False,
    ) -> list[list[int]]:
        """The bytes of each text; messages are written one on a line, with their roles."""
        return self.prompts([text if isinstance(text, str) else f"\n{_plain(text)}" for text in texts])

    def texts(self, rows: Sequence[Sequence[int]], bare: bool = False) -> list[str]:
        """The text of each row of bytes."""
        return [bytes(number for number in row if number < END).decode(errors="replace") for row in rows]

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> ByteEncoder:
        """The encoder itself: there is no model that could be told of tools."""
        return self

    def calls(self, ids: Sequence[int]) -> list[ToolCall]:
        """No calls: bytes stand for no model that could call a tool."""
        return []


def _worded(texts: Sequence[str | list[Message]], wording: Wording) -> list[str | list[Message]]:
    return [wording.of(Record(text if isinstance(text, str) else tuple(text))) for text in texts]


def _plain(wording: str | list[Message]) -> str:
    if isinstance(wording, str):
        return wording
    return "".join(f"{message['role']}: {text_of(message)}\n" for message in wording) + "assistant: "


class TokenizerEncoder:
    """The tokenizer of a model folder. ``variables``: what its chat template is given beside messages. Raises
    PlanError where it cannot be loaded."""

    def __init__(
        self, folder: str | os.PathLike[str], variables: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        self.folder, self.variables = Path(folder), dict(variables)
        self.tokenizer = _load(self.folder)
        self.chats = bool(getattr(self.tokenizer, "chat_template", None))
        self.tools: tuple[Mapping[str, Any], ...] = ()

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> TokenizerEncoder:
        """A copy whose chat template is given tools. Raises PlanError for a template that says nothing of
        them, or that writes earlier turns otherwise once a tool has answered, and for models whose calls are
        not known."""
        other = copy.copy(self)
        for name in ("_template", "controls"):
            other.__dict__.pop(name, None)
        other.tools = tuple(tools)
        if tools and not self.chats:
            raise no_template(self.folder)
        if tools:
            opening = check_template(other._template, tools, parses_itself(self.tokenizer))
            other.__dict__["calls"] = calls_by(
                self.tokenizer, other._template.text, self.folder, opening, tools
            )
        return other

    def calls(self, ids: Sequence[int]) -> list[ToolCall]:
        """The calls of tools in sampled ids; none where the model was told of no tools."""
        return []

    @cached_property
    def longest(self) -> int:
        """The most characters that one token stands for."""
        return max(map(len, self.tokenizer.get_vocab()))

    def prompts(self, wordings: Sequence[str | list[Message]]) -> list[list[int]]:
        """The token ids of each prompt. Plain text that does not bring the tokenizer's first tokens (BOS)
        gets them; a chat template writes its own. Raises PlanError."""
        return self._begun(wordings, self._encode(self.worded(wordings)))

    def asked(self, texts: Sequence[str | list[Message]], wording: Wording) -> list[list[int]]:
        """The token ids of each prompt, in which control tokens are those that the template writes and those
        that begin a text. Raises PlanError."""
        hidden, marks = self._hidden(texts)
        wordings = _worded(hidden, wording)
        return self._begun(wordings, self.controls.encoded(self.worded(wordings), marks, self._encode))

    def _begun(self, wordings: Sequence[str | list[Message]], rows: list[list[int]]) -> list[list[int]]:
        """The rows, those of plain text with the tokens that the tokenizer puts before a text."""
        first = self._first
        return [
            row if not isinstance(wording, str) or row[: len(first)] == first else [*first, *row]
            for wording, row in zip(wordings, rows, strict=True)
        ]

    @cached_property
    def _first(self) -> list[int]:
        """The tokens that the tokenizer puts before any text. Those that it puts after one end it, and the
        response is still to come."""
        (bare,), (whole,) = self._encode(["a"]), self._encode(["a"], True)
        return whole[: next((at for at in range(len(whole)) if whole[at : at + len(bare)] == bare), 0)]

    @cached_property
    def controls(self) -> Controls:
        """The control tokens of the tokenizer."""
        return Controls(self.tokenizer, self._template.text if self.chats else "")

    def _hidden(self, said: Sequence[str | list[Message]]) -> tuple[list[Any], StandIns]:
        return self.controls.hidden(said, (REPLY, self._template.text) if self.chats else ())

    def worded(self, wordings: Sequence[str | list[Message]]) -> list[str]:
        """The text of each prompt; messages go through the chat template, which writes special tokens too.
        Raises PlanError."""
        conversations = [item for item in wordings if not isinstance(item, str)]
        chats = iter(self._template.render(conversations) if conversations else ())
        return [item if isinstance(item, str) else next(chats) for item in wordings]

    @cached_property
    def ends(self) -> Ends:
        """The tokens at which replies of the model end."""
        return ends_of(self.folder, self.variables, lambda: self._template)

    def responses(self, texts: Sequence[str], chat: bool = True) -> list[list[int]]:
        """The token ids of each response, with the token that ends it: in a chat what the template writes
        after a reply, else the tokenizer's end of text. Raises PlanError where there is none."""
        ends = self.ends
        end, space = (ends.of_chat, ends.space) if chat and ends.of_chat is not None else (ends.of_text, "")
        if end is None:
            raise PlanError.of(
                "tokenizer-eos",
                f"the tokenizer of {self.folder} has no end-of-sequence token",
                expected="an eos_token",
                remedy="set eos_token in its tokenizer_config.json",
            )
        return [[*ids, end] for ids in self._encode([text + space for text in texts])]

    def turns(self, wording: str | list[Message], response: Sequence[Message]) -> list[Turn]:
        """Between what the assistant says stands what the chat template writes there, tokenised by itself, as
        while a model samples. Raises PlanError for prompts that are no chat, and for a template that writes
        earlier turns otherwise once there are later ones.
        """
        if isinstance(wording, str):
            raise PlanError.of(
                "turns-chat",
                "a response of several turns needs a chat template",
                found="prompts that are plain text",
                expected="a model whose tokenizer has one",
                remedy="set chat = true, or map the completion to a text",
            )
        turns: list[Turn] = []
        exchanges, messages = divided(response), list(wording)
        for place, (context, message) in enumerate(exchanges):
            messages += context
            reply = message["content"] if is_plain(message) else self._template.reply(messages, message)
            if place + 1 == len(exchanges):
                return [*turns, (self.responses([reply])[0], True)]
            (between,) = self._encode(
                self._template.after_reply(messages, [exchanges[place + 1][0]], (message, reply))
            )
            closed = self._closed(between)
            ended = self._encode([reply])[0] + between[:closed] if closed else self.responses([reply])[0]
            turns += [(ended, True), (between[closed:], False)]
            messages.append(message)
        return turns

    def following(
        self,
        texts: Sequence[str | list[Message]],
        sampled: Sequence[Sequence[int]],
        wording: Wording,
        controls: bool = False,
    ) -> list[list[int]]:
        """The token ids of each text; in a chat, what the template writes between a reply and the next one:
        the difference that the turn makes after a question and a reply that stand for any. Ids that were
        sampled are never encoded again. Raises PlanError for a template that writes earlier turns otherwise
        once there are later ones."""
        said, marks = (list(texts), StandIns()) if controls else self._hidden(texts)
        plain = {row: text for row, text in enumerate(said) if isinstance(text, str) and not wording.chat}
        chats: dict[int, list[Message]] = {
            row: [{"role": "user", "content": text}] if isinstance(text, str) else text
            for row, text in enumerate(said)
            if row not in plain
        }
        written = [*plain.values(), *(self._turns(list(chats.values()), wording) if chats else [])]
        ids = dict(
            zip(
                [*plain, *chats],
                self._encode(written) if controls else self.controls.encoded(written, marks, self._encode),
                strict=True,
            )
        )
        return [
            self._unended(ids[row], sampled[row]) if row in chats else ids[row] for row in range(len(texts))
        ]

    def _turns(self, later: Sequence[list[Message]], wording: Wording) -> list[str]:
        """The text of further turns as the chat template writes them after a reply."""
        opening = replace(wording, chat=True).of(Record(QUESTION))
        assert isinstance(opening, list)
        return self._template.after_reply(opening, later)

    def _unended(self, turn: list[int], sampled: Sequence[int]) -> list[int]:
        """What stands between sampled ids and the next reply, of what the template writes after a reply. The
        token at which sampling ended stands in the place of the template's own end; where that is what the
        next turn begins with, another one stands before it."""
        closed, ends = self._closed(turn), self.ends
        if not closed or not sampled or sampled[-1] not in ends.ids:
            return turn
        own = turn[closed - 1] == sampled[-1] or (ends.always and turn[closed - 1] == ends.of_chat)
        return turn[closed:] if own else turn

    def _closed(self, turn: Sequence[int]) -> int:
        """How many of the tokens that the template writes after a reply are of the reply: space and the token
        that ends it, where the template writes one."""
        at = next((place for place, token in enumerate(turn) if token in self.ends.ids), None)
        if at is None or self.tokenizer.decode(list(turn[:at]), skip_special_tokens=False).strip():
            return 0
        return at + 1

    def texts(self, rows: Sequence[Sequence[int]], bare: bool = False) -> list[str]:
        """The text of each row of token ids, without padding and what ends it. bare: without the special
        tokens inside it either."""
        return completions(self.tokenizer, rows, self.ends.ids, bare)

    def _encode(self, texts: Sequence[Any], special: bool = False) -> list[list[int]]:
        if not texts:
            return []
        try:
            return [list(row) for row in self.tokenizer(list(texts), add_special_tokens=special)["input_ids"]]
        # a tokenizer is the model's own: what it cannot encode is not for us to say
        except Exception as error:
            raise PlanError.of(
                "tokenizer",
                f"the tokenizer of {self.folder} refuses a text: {type(error).__name__}: {error}",
                found=repr(str(self._refused(texts, special))[:60]),
                expected="texts that it can encode",
            ) from error

    def _refused(self, texts: Sequence[Any], special: bool) -> Any:
        """The first of some texts that the tokenizer refuses by itself; else the first of all."""
        for text in texts:
            try:
                self.tokenizer([text], add_special_tokens=special)
            except Exception:
                return text
        return texts[0]

    def check_variables(self) -> None:
        """Raises PlanError for variables that rlflow sets or that the chat template does not read."""
        check_variables(self.variables, self._template if self.chats and self.variables else None)

    @property
    def _variables(self) -> dict[str, Any]:
        return {
            **self.tokenizer.special_tokens_map,
            **self.variables,
            **({"tools": list(self.tools)} if self.tools else {}),
        }

    @cached_property
    def _template(self) -> ChatTemplate:
        if not self.chats:
            raise PlanError.of(
                "chat-template",
                f"the tokenizer of {self.folder} has no chat template",
                found="prompts to be put as a chat",
                expected="a chat_template",
                remedy="name an instruct model, whose tokenizer has one; or, where prompts are text, "
                "--data.chat false; conversations always need one: without it map a field that is text, "
                "--data.prompt FIELD",
            )
        try:
            return ChatTemplate(
                self.folder,
                str(self.tokenizer.get_chat_template(tools=list(self.tools) or None)),
                self._variables,
            )
        except ValueError as error:  # several, and none is the default
            raise PlanError.of(
                "chat-template",
                f"the tokenizer of {self.folder} has no one chat template",
                found=str(error),
                expected="one, or one of them named default",
                remedy="leave one in its tokenizer_config.json",
            ) from error


def _load(folder: Path) -> Any:
    if not folder.is_dir():
        raise PlanError.of(
            "tokenizer-missing", f"no such model folder: {folder}", expected="a folder with a tokenizer"
        )
    try:
        return pretrained.read_tokenizer(folder)
    except PlanError:
        raise
    except Exception as error:  # whatever its files make of transformers
        raise PlanError.of(
            "tokenizer-missing",
            f"cannot load the tokenizer of {folder}: {error}",
            found=listed(sorted(item.name for item in folder.iterdir())),
            expected="tokenizer.json and its config",
        ) from error
