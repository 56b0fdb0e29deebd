"""Turns prompts into token ids.

``Wording`` puts a record's prompt into the user's prompt template and adds the system message. An encoder
then applies the chat template and the model's tokenizer. Without a model, the ids are the text's bytes.
"""

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
from rlflow.data.turns import Turn, answered, divided
from rlflow.errors import PlanError, listed
from rlflow.training import pretrained

END = 256  # end-of-text id of the byte encoding


@dataclass(frozen=True)
class Wording:
    """How a prompt is presented to the model.

    Prompts that are lists of messages go through the tokenizer's chat template.
    """

    # True: text prompts also go through the chat template, as a user message.
    chat: bool = False
    system: str | None = None  # system message for conversations that do not begin with a system message
    template: str | None = None  # text around a plain prompt, such as "Q: {prompt}\\nA:"
    # Additional variables for the chat template.
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.template is not None:
            _check_template(self.template)

    def of(self, record: Record) -> str | list[Message]:
        """Return the record's prompt as formatted text, or as messages for the chat template.

        Raises PlanError if a setting does not apply to this kind of prompt.
        """
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
    if set(names) != {"prompt"}:  # this also refuses a format width, which could be huge
        raise PlanError.of(
            "data-template",
            "the template must contain {prompt} and no other field",
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
        remedy="remove it, or set chat = true for prompts that are text and a model with a chat template",
    )


class Encoder(Protocol):
    """Turns formatted prompts and responses into token ids, and ids into text."""

    chats: bool  # True if it has a chat template

    @property
    def longest(self) -> int:
        """The largest number of characters in one token."""

    def worded(self, wordings: Sequence[str | list[Message]]) -> list[str]:
        """Return the text of each prompt as the model reads it. Messages go through the chat template."""

    def prompts(self, wordings: Sequence[str | list[Message]]) -> list[list[int]]:
        """Return the token ids of each prompt. A prompt is a string, or messages for the chat template."""

    def asked(self, texts: Sequence[str | list[Message]], wording: Wording) -> list[list[int]]:
        """Return the token ids of follow-up prompts, which contain text from models or environments.

        Such text is never encoded as control tokens. ``wording``: how the prompts are presented to the model.
        """

    def responses(self, texts: Sequence[str], chat: bool = True) -> list[list[int]]:
        """Return the token ids of each response, with the end token.

        ``chat``: True if the prompts are chats.
        """

    def replies(self, texts: Sequence[str | list[Message]], wording: Wording) -> list[list[Turn]]:
        """Return the turns of each response, which is text from models or environments.

        Such text is never encoded as control tokens. Each response is a string, or messages that begin and
        end with the assistant. ``wording``: how the prompts are presented to the model.
        """

    def turns(self, wording: str | list[Message], response: Sequence[Message]) -> list[Turn]:
        """Split a multi-turn response into turns, each as (token ids, whether the assistant wrote them).

        ``wording``: the formatted prompt that the response answers.
        """

    def following(
        self,
        texts: Sequence[str | list[Message]],
        sampled: Sequence[Sequence[int]],
        wording: Wording,
        controls: bool = False,
    ) -> list[list[int]]:
        """Return the token ids to append after sampled ids, for the next turn of each row.

        ``texts``: each row's next turn, as a string or messages. ``sampled``: the ids sampled by the model
        for each row. ``controls``: True to encode control tokens that are written out in a turn as control
        tokens.
        """

    def texts(self, rows: Sequence[Sequence[int]], bare: bool = False) -> list[str]:
        """Decode each row of token ids, leaving out padding and end tokens.

        ``bare``: True to leave out special tokens inside the text too.
        """

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> Encoder:
        """Return a copy of the encoder whose chat template describes ``tools``, given as JSON schemas."""

    def calls(self, ids: Sequence[int]) -> list[ToolCall]:
        """Return the tool calls in ids sampled by a model. Empty if there are none."""


class ByteEncoder:
    """The encoder for runs without a model.

    Token ids are UTF-8 bytes, and the id END follows each response.
    """

    chats = False
    longest = 1

    def worded(self, wordings: Sequence[str | list[Message]]) -> list[str]:
        """Return the text of each prompt. Messages take one line each, with their roles."""
        return [_plain(item) for item in wordings]

    def prompts(self, wordings: Sequence[str | list[Message]]) -> list[list[int]]:
        """Return the bytes of each prompt's text."""
        return [list(text.encode()) for text in self.worded(wordings)]

    def asked(self, texts: Sequence[str | list[Message]], wording: Wording) -> list[list[int]]:
        """Return the bytes of each text, without END."""
        return self.prompts(_worded(texts, wording))

    def responses(self, texts: Sequence[str], chat: bool = True) -> list[list[int]]:
        """Return the bytes of each response, followed by END."""
        return [[*text.encode(), END] for text in texts]

    def replies(self, texts: Sequence[str | list[Message]], wording: Wording) -> list[list[Turn]]:
        """Return the turns of each response, as bytes, each followed by END."""
        return answered(self, _exchanges(texts, wording))

    def turns(self, wording: str | list[Message], response: Sequence[Message]) -> list[Turn]:
        """Split a multi-turn response into turns, each as (bytes, whether the assistant wrote them)."""
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
        """Return the bytes to append for each row's next turn.

        Messages take one line each, with their roles.
        """
        return self.prompts([text if isinstance(text, str) else f"\n{_plain(text)}" for text in texts])

    def texts(self, rows: Sequence[Sequence[int]], bare: bool = False) -> list[str]:
        """Return the text of each row of bytes."""
        return [bytes(number for number in row if number < END).decode(errors="replace") for row in rows]

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> ByteEncoder:
        """Return this encoder, because without a model there's no template to describe tools."""
        return self

    def calls(self, ids: Sequence[int]) -> list[ToolCall]:
        """Return an empty list, because without a model, replies have no tool calls."""
        return []


def _worded(texts: Sequence[str | list[Message]], wording: Wording) -> list[str | list[Message]]:
    return [wording.of(Record(text if isinstance(text, str) else tuple(text))) for text in texts]


def _exchanges(
    texts: Sequence[str | list[Message]], wording: Wording
) -> list[tuple[str | list[Message], str | list[Message]]]:
    """Pair each response with a placeholder prompt, which is a chat if the response is messages."""
    return [
        (replace(wording, chat=wording.chat or not isinstance(text, str)).of(Record(QUESTION)), text)
        for text in texts
    ]


def _plain(wording: str | list[Message]) -> str:
    if isinstance(wording, str):
        return wording
    return "".join(f"{message['role']}: {text_of(message)}\n" for message in wording) + "assistant: "


class TokenizerEncoder:
    """Encodes with the tokenizer of a model folder.

    ``variables``: additional variables for the chat template. Raises PlanError if the tokenizer can't be
    loaded.
    """

    def __init__(
        self, folder: str | os.PathLike[str], variables: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        self.folder, self.variables = Path(folder), dict(variables)
        self.tokenizer = _load(self.folder)
        self.chats = bool(getattr(self.tokenizer, "chat_template", None))
        self.tools: tuple[Mapping[str, Any], ...] = ()

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> TokenizerEncoder:
        """Return a copy of the encoder whose chat template describes ``tools``.

        Raises PlanError if the template doesn't describe tools or changes earlier turns after a tool's
        answer, or if the format of the model's tool calls is unknown.
        """
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
        """Return the tool calls in ids sampled by a model. Empty if the template describes no tools."""
        return []

    @cached_property
    def longest(self) -> int:
        """The largest number of characters in one token."""
        return max(map(len, self.tokenizer.get_vocab()))

    def prompts(self, wordings: Sequence[str | list[Message]]) -> list[list[int]]:
        """Return the token ids of each prompt.

        If the tokenizer begins strings with a token such as BOS, plain text that lacks it gets it. A chat
        template writes it by itself. Raises PlanError if a prompt can't be encoded.
        """
        return self._with_first(wordings, self._encode(self.worded(wordings)))

    def asked(self, texts: Sequence[str | list[Message]], wording: Wording) -> list[list[int]]:
        """Return the token ids of each follow-up prompt.

        The only control tokens are the template's, and those that begin every text (BOS). Raises PlanError if
        a prompt can't be encoded.
        """
        hidden, marks = self._hidden(texts)
        wordings = _worded(hidden, wording)
        return self._with_first(wordings, self.controls.encoded(self.worded(wordings), marks, self._encode))

    def _with_first(self, wordings: Sequence[str | list[Message]], rows: list[list[int]]) -> list[list[int]]:
        """Add the tokenizer's first tokens (BOS) to the ids of plain text that lacks them."""
        first = self._first
        return [
            row if not isinstance(wording, str) or row[: len(first)] == first else [*first, *row]
            for wording, row in zip(wordings, rows, strict=True)
        ]

    @cached_property
    def _first(self) -> list[int]:
        """The tokens that the tokenizer puts before any text, such as BOS.

        Those it puts after a text aren't included, because they would end the text before the response.
        """
        (bare,), (whole,) = self._encode(["a"]), self._encode(["a"], True)
        return whole[: next((at for at in range(len(whole)) if whole[at : at + len(bare)] == bare), 0)]

    @cached_property
    def controls(self) -> Controls:
        """The control tokens of the tokenizer."""
        return Controls(self.tokenizer, self._template.text if self.chats else "")

    def _hidden(self, contents: Sequence[str | list[Message]]) -> tuple[list[Any], StandIns]:
        return self.controls.hidden(contents, (REPLY, self._template.text) if self.chats else ())

    def worded(self, wordings: Sequence[str | list[Message]]) -> list[str]:
        """Return the text of each prompt as the model reads it. Messages go through the chat template.

        The text includes the template's special tokens. Raises PlanError if the template refuses a prompt.
        """
        conversations = [item for item in wordings if not isinstance(item, str)]
        chats = iter(self._template.render(conversations) if conversations else ())
        return [item if isinstance(item, str) else next(chats) for item in wordings]

    @cached_property
    def ends(self) -> Ends:
        """The tokens that end the model's replies."""
        return ends_of(self.folder, self.variables, lambda: self._template)

    def responses(self, texts: Sequence[str], chat: bool = True) -> list[list[int]]:
        """Return the token ids of each response, with the end token.

        In a chat, the end token is the one that the template writes after a reply; otherwise, it's the
        tokenizer's end of text. Raises PlanError if there is none.
        """
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

    def replies(self, texts: Sequence[str | list[Message]], wording: Wording) -> list[list[Turn]]:
        """Return the turns of each response. The only control tokens are the template's and the end tokens.

        Raises PlanError if a response can't be encoded.
        """
        hidden, marks = self._hidden(texts)
        careful = copy.copy(self)
        vars(careful)["_encode"] = lambda given: self.controls.encoded(given, marks, self._encode)
        return answered(careful, _exchanges(hidden, wording))

    def turns(self, wording: str | list[Message], response: Sequence[Message]) -> list[Turn]:
        """Split a multi-turn response into turns, each as (token ids, whether the assistant wrote them).

        What the chat template writes between two assistant messages is encoded separately, as it is when
        sampling. Raises PlanError if the prompt isn't a chat, or if the template changes earlier turns once
        later turns follow.
        """
        if isinstance(wording, str):
            raise PlanError.of(
                "turns-chat",
                "a multi-turn response needs a chat template",
                found="prompts that are plain text",
                expected="a model whose tokenizer has a chat template",
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
        """Return the token ids to append after sampled ids, for the next turn of each row.

        In a chat, this is what the template writes from the end of one reply to the beginning of the next.
        It's found by rendering a placeholder question and reply, so sampled ids are never re-encoded. Raises
        PlanError if the template changes earlier turns once later turns follow.
        """
        contents, marks = (list(texts), StandIns()) if controls else self._hidden(texts)
        plain = {row: text for row, text in enumerate(contents) if isinstance(text, str) and not wording.chat}
        chats: dict[int, list[Message]] = {
            row: [{"role": "user", "content": text}] if isinstance(text, str) else text
            for row, text in enumerate(contents)
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
        """For each list of later turns, return what the chat template writes after a reply."""
        opening = replace(wording, chat=True).of(Record(QUESTION))
        assert isinstance(opening, list)
        return self._template.after_reply(opening, later)

    def _unended(self, turn: list[int], sampled: Sequence[int]) -> list[int]:
        """Return the ids to insert between sampled ids and the next reply.

        ``turn``: the ids that the template writes after a reply, which usually begin with an end token. This
        token is dropped if sampling already ended with one, unless it's a different one that also begins the
        next turn.
        """
        closed, ends = self._closed(turn), self.ends
        if not closed or not sampled or sampled[-1] not in ends.ids:
            return turn
        own = turn[closed - 1] == sampled[-1] or (ends.always and turn[closed - 1] == ends.of_chat)
        return turn[closed:] if own else turn

    def _closed(self, turn: Sequence[int]) -> int:
        """Return how many ids of ``turn`` still belong to the reply: leading white space and the end token.

        ``turn``: the ids that the template writes after a reply. Returns 0 if they don't begin with an end
        token.
        """
        at = next((place for place, token in enumerate(turn) if token in self.ends.ids), None)
        if at is None or self.tokenizer.decode(list(turn[:at]), skip_special_tokens=False).strip():
            return 0
        return at + 1

    def texts(self, rows: Sequence[Sequence[int]], bare: bool = False) -> list[str]:
        """Decode each row of token ids, leaving out padding and end tokens.

        ``bare``: True to leave out special tokens inside the text too.
        """
        return completions(self.tokenizer, rows, self.ends.ids, bare)

    def _encode(self, texts: Sequence[Any], special: bool = False) -> list[list[int]]:
        if not texts:
            return []
        try:
            return [list(row) for row in self.tokenizer(list(texts), add_special_tokens=special)["input_ids"]]
        # The tokenizer comes with the model and may raise any exception.
        except Exception as error:
            raise PlanError.of(
                "tokenizer",
                f"the tokenizer of {self.folder} refuses a text: {type(error).__name__}: {error}",
                found=repr(str(self._refused(texts, special))[:60]),
                expected="texts that it can encode",
                remedy="correct the text, or drop such records: --bad-records skip",
            ) from error

    def _refused(self, texts: Sequence[Any], special: bool) -> Any:
        """Return the first text that the tokenizer can't encode on its own, or else the first text."""
        for text in texts:
            try:
                self.tokenizer([text], add_special_tokens=special)
            except Exception:
                return text
        return texts[0]

    def check_variables(self) -> None:
        """Raise PlanError for template variables that rlflow sets itself or the chat template doesn't read."""
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
                found="prompts to be formatted as a chat",
                expected="a chat_template",
                remedy="use an instruct model, whose tokenizer has one; for text prompts, --data.chat "
                "false; conversations always need a template: without one, map a text field with "
                "--data.prompt FIELD",
            )
        try:
            return ChatTemplate(
                self.folder,
                str(self.tokenizer.get_chat_template(tools=list(self.tools) or None)),
                self._variables,
            )
        except ValueError as error:  # there are several templates and no default
            raise PlanError.of(
                "chat-template",
                f"the tokenizer of {self.folder} has several chat templates and no default",
                found=str(error),
                expected="one template, or one of them named default",
                remedy="keep only one in its tokenizer_config.json",
            ) from error


def _load(folder: Path) -> Any:
    if not folder.is_dir():
        raise PlanError.of(
            "tokenizer-missing",
            f"no such model folder: {folder}",
            expected="a folder with a tokenizer",
            remedy="correct the path; rlflow does not download models",
        )
    try:
        return pretrained.read_tokenizer(folder)
    except PlanError:
        raise
    except Exception as error:  # transformers may raise any error for malformed files
        raise PlanError.of(
            "tokenizer-missing",
            f"cannot load the tokenizer of {folder}: {error}",
            found=listed(sorted(item.name for item in folder.iterdir())),
            expected="tokenizer.json and its config",
            remedy="copy the tokenizer's files of the model into the folder",
        ) from error
