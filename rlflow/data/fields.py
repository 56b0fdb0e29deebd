"""Maps the fields of a file to records of one shape: prompts, completions, or pairs of responses."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rlflow.author.columns import Kind, Level
from rlflow.author.messages import Message, as_text, fault, is_plain
from rlflow.data.json_fields import JsonFields, packed, value_of
from rlflow.data.records import Raw
from rlflow.errors import Place, PlanError, listed, nearest

Shape = Literal["prompts", "completions", "pairs"]
Response = str | tuple[Message, ...]

FIELDS = ("prompt", "answer", "completion", "chosen", "rejected")
CHATS = ("messages", "conversations")  # fields with a complete conversation
OTHER_NAMES = {
    "prompt": ("question", "problem", "instruction", "input", *CHATS),
    "answer": ("solution", "ground_truth", "reward_model.ground_truth", "target", "label"),
}
# Fields that identify the records of a different project.
OF_PROJECTS = {"reward_model.ground_truth": "verl", "input": "OpenRLHF", "label": "OpenRLHF"}
# ShareGPT's words for the roles of messages, with the keys "from" and "value"
ROLES = {"human": "user", "gpt": "assistant", "observation": "tool", "function": "tool"}
TYPES: dict[str, tuple[type, ...]] = {"float": (float, int), "int": (int,), "bool": (bool,)}


@dataclass(frozen=True, slots=True)
class Record:
    """One record of the data: its prompt, with its answer, responses and further columns."""

    prompt: str | tuple[Message, ...]
    answer: str | None = None  # the right answer
    # A completion, or (chosen, rejected). A list of messages begins and ends with the assistant.
    responses: tuple[Response, ...] = ()
    # Declared column → value; for a field that rewards read, its column → its value as JSON.
    more: Mapping[str, Any] = field(default_factory=dict)
    place: Place | None = field(default=None, compare=False)  # file and line
    # The record's number among all records in the data, from 0; unreadable records count too.
    number: int = field(default=0, compare=False)

    @property
    def question(self) -> str:
        """The prompt as one text."""
        return as_text(self.prompt)


@dataclass(frozen=True)
class Mapped:
    """A mapping from the fields of a file to records."""

    fields: Mapping[str, str]  # rlflow's name → the file's field
    columns: Mapping[str, Kind]  # declared columns
    json_fields: JsonFields = JsonFields()  # fields that rewards read

    @property
    def shape(self) -> Shape:
        """What each record has: "prompts", "completions" (prompt and completion) or "pairs" (two responses)."""
        return (
            "completions"
            if "completion" in self.fields
            else "pairs"
            if "chosen" in self.fields
            else "prompts"
        )

    @property
    def responses(self) -> tuple[str, ...]:
        """rlflow's names for a record's responses: none, ("completion",) or ("chosen", "rejected")."""
        return {"prompts": (), "completions": ("completion",), "pairs": ("chosen", "rejected")}[self.shape]

    def record(self, raw: Raw) -> Record:
        """Convert one line or row of the file to a record.

        Raises PlanError if a field is missing or has the wrong type.
        """
        answer = _text(raw, self.fields["answer"]) if "answer" in self.fields else None
        responses = tuple(
            _response(raw, self.fields[name], "prompt" in self.fields) for name in self.responses
        )
        declared = {name: _declared(raw, self.fields[name], kind) for name, kind in self.columns.items()}
        for column in self.json_fields.required:
            _value(raw, self.json_fields.columns[column])
        texts = {column: packed(raw.fields, source) for column, source in self.json_fields.columns.items()}
        return Record(self._prompt(raw), answer, responses, declared | texts, raw.place, raw.number)

    def _prompt(self, raw: Raw) -> str | tuple[Message, ...]:
        if "prompt" in self.fields:
            name = self.fields["prompt"]
            prompt = _prompt(_value(raw, name), raw, name)
            return _without_reply(prompt, raw, name) if name in CHATS else prompt
        # A response that is a complete conversation contains its prompt.
        first, *other_prompts = [_value(raw, self.fields[name])[:-1] for name in self.responses]
        if any(prompt != first for prompt in other_prompts):
            raise _bad_field(raw, "chosen and rejected answer different conversations", "one prompt for both")
        return _prompt(first, raw, self.responses[0])


def mapped(
    first: Raw, chosen: Mapping[str, str | None], columns: Mapping[str, Kind], completions: bool = False
) -> Mapped:
    """Return the mapping that fits the first record.

    ``chosen``: the field that the user maps to each name, or None if the file has no such field.
    ``completions``: True to take the assistant's last message of a conversation as the completion, if there's
    no field for it. Raises PlanError if a required field is missing.
    """
    names = dict.fromkeys([*FIELDS, *columns])
    for name in chosen:
        if name not in names:
            raise PlanError.of(
                "data-fields",
                f"'{name}' is not a column of the data",
                place=first.place,
                expected=listed(names),
                nearest=nearest(name, names),
                remedy="map rlflow's name to the file's: prompt=question",
            )
    sources = {name: _field(first, name, chosen) for name in names}
    fields = {name: source for name, source in sources.items() if source is not None}
    if completions and not fields.keys() & {"completion", "chosen"} and fields.get("prompt") in CHATS:
        fields |= {"completion": fields["prompt"]} if _ends_with_reply(first, fields["prompt"]) else {}
    _check_shape(first, fields, columns)
    return Mapped(fields, columns)


def _field(first: Raw, name: str, chosen: Mapping[str, str | None]) -> str | None:
    if name in chosen:
        source = chosen[name]
        if source and not _has(first, source):
            raise _missing_field(first, source, f"the field for '{name}'", column=name)
        return source or None
    return next(
        (candidate for candidate in (name, *OTHER_NAMES.get(name, ())) if _has(first, candidate)), None
    )


def _check_shape(first: Raw, fields: Mapping[str, str], columns: Mapping[str, Kind]) -> None:
    for name, kind in columns.items():
        if kind.level not in (Level.TEXT, Level.ROW):
            raise _bad_field(
                first,
                f"the declared column '{name}' is of kind {kind}",
                "text, or a row column of numbers",
                "declare the column with such a kind",
            )
        if name not in fields:
            raise _missing_field(first, name, f"a field for the declared column '{name}'")
    if ("chosen" in fields) != ("rejected" in fields):
        raise _bad_field(
            first,
            "a pair needs both 'chosen' and 'rejected'",
            "both, or neither",
            "map both: --data.chosen FIELD --data.rejected FIELD",
        )
    if "chosen" in fields and "completion" in fields:
        raise _bad_field(
            first,
            "the data has both a completion and a pair",
            "one of them",
            "use data with one of them; in Python, fields={'completion': None} drops one",
        )
    if "prompt" not in fields and not ("chosen" in fields and _conversation(first, fields["chosen"])):
        raise _missing_field(
            first, "prompt", f"a field 'prompt' (also accepted: {listed(OTHER_NAMES['prompt'])})"
        )


def _conversation(raw: Raw, name: str) -> bool:
    value = _value(raw, name)
    return isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 1


def _has(raw: Raw, name: str) -> bool:
    try:
        return _value(raw, name) is not None
    except PlanError:
        return False


def _value(raw: Raw, name: str) -> Any:
    """Return the value of a field. A dotted name such as reward_model.ground_truth names a nested field.

    Raises PlanError if the field is missing.
    """
    try:
        return value_of(raw.fields, name)
    except KeyError:
        raise _missing_field(raw, name, f"a field '{name}' in every record") from None


def _ends_with_reply(raw: Raw, name: str) -> bool:
    prompt = _prompt(_value(raw, name), raw, name)
    return not isinstance(prompt, str) and prompt[-1]["role"] == "assistant"


def _without_reply(prompt: str | tuple[Message, ...], raw: Raw, name: str) -> str | tuple[Message, ...]:
    """Return a conversation without its last message, if that's the assistant's."""
    if isinstance(prompt, str) or prompt[-1]["role"] != "assistant":
        return prompt
    if len(prompt) == 1:
        raise _bad_field(raw, f"the field '{name}' begins with the assistant", "a message of the user first")
    return prompt[:-1]


def _prompt(value: Any, raw: Raw, name: str) -> str | tuple[Message, ...]:
    if name in CHATS:
        value = _decoded(value, raw)
    if isinstance(value, str):
        return _unicode(value, raw, name)
    if isinstance(value, Sequence) and value:
        return _messages(value, raw, name)
    raise _bad_field(
        raw,
        f"the field '{name}' is not a prompt: {_short(value)}",
        'a text, or a list of messages such as {"role": "user", "content": "…"}',
    )


def _messages(value: Sequence[Any], raw: Raw, name: str) -> tuple[Message, ...]:
    """Check the messages in a field, and return them without keys whose value is None.

    Raises PlanError for a message that no chat template would accept.
    """
    whole = [
        _without_none(_standard(message), raw.filled) if isinstance(message, Mapping) else message
        for message in value
    ]
    for number, message in enumerate(whole, 1):
        if problem := fault(message):
            raise _bad_field(
                raw,
                f"message {number} of the field '{name}' is invalid: {problem}",
                'messages such as {"role": "user", "content": "…"}, whose other keys are plain JSON too',
            )
    return tuple(
        {**message, **({"content": _unicode(text, raw, name)} if (text := message.get("content")) else {})}
        for message in whole
    )


def _decoded(value: Any, raw: Raw) -> Any:
    """Decode a string from a CSV file if it's JSON, and return any other value unchanged."""
    if raw.text and isinstance(value, str) and value.lstrip().startswith("["):
        with contextlib.suppress(ValueError):
            return json.loads(value)
    return value


def _standard(message: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Convert a ShareGPT message (from, value) to the usual keys (role, content)."""
    if "role" in message or not message.keys() >= {"from", "value"}:
        return message
    role = ROLES.get(message["from"], message["from"])
    rest = {key: item for key, item in message.items() if key not in ("from", "value", "weight")}
    return {"role": role, "content": message["value"], **rest}


def _without_none(message: Mapping[Any, Any], filled: bool) -> dict[Any, Any]:
    """Return the message without keys whose value is None, including nested ones if ``filled``.

    A content of None is kept, because a message may have nothing but tool calls.
    """
    return {
        key: _dense(item) if filled else item
        for key, item in message.items()
        if item is not None or key == "content"
    }


def _dense(value: Any) -> Any:
    """Remove the mapping entries whose value is None from a nested value."""
    if isinstance(value, Mapping):
        return {key: _dense(item) for key, item in value.items() if item is not None}
    return [_dense(item) for item in value] if isinstance(value, list | tuple) else value


def _response(raw: Raw, name: str, prompted: bool) -> Response:
    """Return the response in a field: a string, or messages.

    If the prompt has a field of its own (``prompted``) and the messages begin with the assistant, they are
    all the response. Otherwise only the assistant's last message is.
    """
    value = _decoded(_value(raw, name), raw) if name in CHATS else _value(raw, name)
    if isinstance(value, str):
        return _unicode(value, raw, name)
    turns = _messages(value, raw, name) if isinstance(value, Sequence) and value else ()
    if turns and turns[-1]["role"] == "assistant":
        if prompted and len(turns) > 1 and turns[0]["role"] == "assistant":
            return turns
        return turns[-1]["content"] if is_plain(turns[-1]) else turns[-1:]
    raise _bad_field(
        raw,
        f"the field '{name}' is not a response: {_short(value)}",
        "a text, or messages that end with the assistant",
    )


def _text(raw: Raw, name: str) -> str:
    """Return a field's value as text. Numbers, lists and objects are written as JSON."""
    value = _value(raw, name)
    if value is None:
        raise _bad_field(raw, f"the field '{name}' is null", "a text or a number")
    return _unicode(
        value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str), raw, name
    )


def _declared(raw: Raw, name: str, kind: Kind) -> Any:
    if kind.level is Level.TEXT:
        return _text(raw, name)
    value, family = _value(raw, name), kind.family or "float"
    if raw.text:
        value = _number(value, family)
    if (
        not isinstance(value, TYPES.get(family, ()))
        or (isinstance(value, bool) and family != "bool")
        or _too_large(value, family)
    ):
        raise _bad_field(
            raw, f"the field '{name}' is {_short(value)}", f"a value for a column of kind {kind}"
        )
    return value


def _number(text: Any, family: str) -> Any:
    """Convert a string from a CSV file to the number or bool it stands for, if it stands for one."""
    try:
        return {"true": True, "false": False}[text.strip().lower()] if family == "bool" else json.loads(text)
    except (ValueError, KeyError, AttributeError):
        return text


def _too_large(value: Any, family: str) -> bool:
    """True for an integer that is too large for the dtypes of ``family`` ("int" or "float")."""
    if not isinstance(value, int):
        return False
    return not (-(2**63) <= value < 2**63 if family == "int" else -(2**127) < value < 2**127)


def _unicode(text: str, raw: Raw, name: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _bad_field(
            raw, f"the field '{name}' is not valid Unicode: {error.reason}", "text without lone surrogates"
        ) from error
    return text


def _short(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text[:80]}{'…' if len(text) > 80 else ''}"


def _bad_field(raw: Raw, message: str, expected: str, remedy: str = "") -> PlanError:
    """Return the error about a field. For a single record it needs no remedy: the summary has one."""
    return PlanError.of(
        "data-field",
        message,
        place=raw.place,
        found=f"fields {listed(raw.fields)}",
        expected=expected,
        remedy=remedy,
    )


def _missing_field(raw: Raw, name: str, expected: str, column: str = "") -> PlanError:
    names = [str(field) for field in raw.fields]
    close = nearest(name, names)
    return PlanError.of(
        "data-field",
        f"the record has no field '{name}'",
        place=raw.place,
        found=f"fields {listed(names)}",
        expected=expected,
        nearest=close,
        remedy=f"map it: --data.{column or name} {close or 'FIELD'}",
    )
