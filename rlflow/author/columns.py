"""Columns: their levels, their dtypes, and the table of standard columns."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

FAMILIES = ("float", "uint", "int", "bool")
# prefix of columns that hold fields in the data as JSON, for rewards; a stage cannot use it
FIELD = "data."

SOURCE = "data:source"  # text column: the data source of each row, if there are several

CLOCK = ("iteration", "progress")  # scalars that the run adds to every batch
# text column: the prompt as the model reads it, with templates applied; for rewards that read it
MODEL_PROMPT = "data:model_prompt"
# text column: the prompt as a string or as messages, before templates are applied; for rewards that read it
CONVERSATION = "data:conversation"
OF_PROMPTS = ("prompt", MODEL_PROMPT, CONVERSATION)  # text columns that hold the prompt in different forms
PART = "part"  # row column of joined rows: which batch the row comes from
PROMPT_ID = "prompt_id"  # row column: the index of the row's record in the data


class Level(StrEnum):
    """What each value of a column belongs to: a token, a row, a group or the whole batch."""

    TOKEN = "token"
    PROMPT = "prompt"
    ROW = "row"
    GROUP = "group"
    SCALAR = "scalar"
    TEXT = "text"


@dataclass(frozen=True)
class Kind:
    """A column's level and dtype. A dtype of None allows any dtype.

    ``row(torch.float32)`` and ``row("float32")`` are the same kind.
    """

    level: Level
    dtype: str | None = None

    def __call__(self, dtype: Any) -> Kind:
        """Return this kind with the given dtype. Raises TypeError if the dtype is unknown."""
        if self.level is Level.TEXT:
            raise TypeError("text has no dtype: write `text`")
        name = {float: "float32", int: "int64", bool: "bool"}.get(dtype, str(dtype).removeprefix("torch."))
        if not any(family in name for family in FAMILIES):
            raise TypeError(
                f"{self.level}({dtype!r}): found an unknown dtype, expected one such as torch.float32"
            )
        return Kind(self.level, name)

    def __str__(self) -> str:
        return " ".join(filter(None, (self.level.value, self.dtype)))

    @property
    def family(self) -> str | None:
        """The family of the dtype: "float", "uint", "int" or "bool", or None if any dtype is allowed.

        Dtypes of one family are silently converted to each other; different families never are.
        """
        return _family(self.dtype)


@functools.cache
def _family(dtype: str | None) -> str | None:
    return None if dtype is None else next((name for name in FAMILIES if name in dtype), dtype)


token = Kind(Level.TOKEN)
prompt = Kind(Level.PROMPT)
row = Kind(Level.ROW)
group = Kind(Level.GROUP)
scalar = Kind(Level.SCALAR)
text = Kind(Level.TEXT)


@dataclass(frozen=True)
class Standard:
    """A standard column: its kind and its meaning."""

    kind: Kind
    meaning: str


TABLE: dict[str, Standard] = {
    "prompt": Standard(text, "the prompt, as stored in the data"),
    "answer": Standard(text, "the right answer, as stored in the data"),
    "completion": Standard(text, "the response, decoded once for rewards; never encoded again"),
    "finish": Standard(
        text,
        '"stop" at EOS or a stop string, "length" at max_tokens; in episodes also "turns", "env", "failed"',
    ),
    "prompt_tokens": Standard(prompt("int64"), "token ids of the prompt"),
    "prefix_length": Standard(
        row("int64"), "number of the prompt's last ids that are the response's own first tokens"
    ),
    "tokens": Standard(token("int64"), "token ids after the prompt, EOS included"),
    "mask": Standard(token("bool"), "True where the policy chose the token and it counts"),
    "sampled_logprobs": Standard(
        token("float32"), "log-probs at sampling time, by the generator; 0 at masked-out tokens"
    ),
    "logprobs": Standard(token("float32"), "log-probs by the trainer, before this iteration's updates"),
    "ref_logprobs": Standard(token("float32"), "log-probs by the reference"),
    "entropy": Standard(token("float32"), "entropy of the next-token distribution, in nats"),
    "values": Standard(token("float32"), "value of the prefix before each token"),
    "rewards": Standard(token("float32"), "reward of each token"),
    "advantages": Standard(token("float32"), "advantage of each token"),
    "returns": Standard(token("float32"), "return from each token on"),
    "weights": Standard(token("float32"), "importance weight between sampler and trainer"),
    "scores": Standard(row("float32"), "reward of the full response; NaN is missing"),
    "temperature": Standard(row("float32"), "sampling temperature; greedy rows have 1.0"),
    "group": Standard(row("int64"), "rows of one prompt share it; they are adjacent"),
    "chosen": Standard(row("bool"), "True for the preferred response of a pair"),
    PART: Standard(row("int64"), "after `concat`: which of the batches the row comes from, from 0"),
    "keep": Standard(group("bool"), "whether `repeat` keeps the group"),
    "prompt_id": Standard(
        row("int64"),
        "index of the row's record in the data, from 0, before any record is held out or skipped",
    ),
    "iteration": Standard(scalar("int64"), "number of the iteration, from 0; a scalar of every batch"),
    "progress": Standard(
        scalar("float32"), "iteration divided by the iterations of the run; a scalar of every batch"
    ),
    "turn": Standard(
        token("int64"), "in an environment, the turn that sampled the token, from 0; -1 at masked-out tokens"
    ),
    "turn_rewards": Standard(
        token("float32"),
        "in an environment, the reward of a turn at its last sampled token; NaN if the turn failed",
    ),
    "turns": Standard(row("int64"), "in an environment, number of turns of the model"),
    "said": Standard(text, "in an environment, what the model wrote in its last turn"),
    "failed": Standard(text, "in an environment, why the episode failed; empty if it did not"),
    "episode": Standard(text, "in an environment, the episode as JSON: the text of each turn"),
    "episode_score": Standard(
        row("float32"),
        "in an environment, the episode's score, or else the sum of its turn rewards; NaN if it failed",
    ),
    "policy_version": Standard(
        token("int64"), "number of updates of the weights that sampled the token; -1 where none did"
    ),
}


class Columns(Mapping[str, Standard]):
    """The standard columns, as a mapping from name to kind and meaning. Prints one line per column."""

    def __getitem__(self, name: str) -> Standard:
        return TABLE[name]

    def __iter__(self) -> Iterator[str]:
        return iter(TABLE)

    def __len__(self) -> int:
        return len(TABLE)

    def __str__(self) -> str:
        return "\n".join(f"{name:<17} {entry.kind!s:<14} {entry.meaning}" for name, entry in TABLE.items())

    __repr__ = __str__


def columns() -> Columns:
    """Return the standard columns with their kinds and meanings. Print the result to see them as a table."""
    return Columns()


def field_column(name: str) -> str:
    """Return the name of the text column that passes the data field ``name`` to rewards."""
    return FIELD + name


def standard_kind(name: str) -> Kind | None:
    """Return the kind of a standard column, or None if ``name`` isn't one."""
    entry = TABLE.get(name)
    return entry.kind if entry else None


def checked_kinds(what: str, kinds: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``kinds`` as a dict, or raise TypeError if one of its values isn't a kind.

    ``what`` names the caller in the message.
    """
    for name, kind in kinds.items():
        if not isinstance(kind, Kind | None):
            raise TypeError(
                f"{what}: found {name}={kind!r}, expected a kind such as row(torch.float32), "
                "token(torch.float32) or text"
            )
    return dict(kinds)


def fits(kind: Kind | None, expected: Kind | None) -> bool:
    """Return True if a parameter of the kind ``expected`` can read a column of the kind ``kind``.

    None stands for any kind. A group column can be read per row: each row gets its group's value.
    """
    if kind is None or expected is None:
        return True
    same_level = kind.level is expected.level or (kind.level, expected.level) == (Level.GROUP, Level.ROW)
    return same_level and (kind.family is None or expected.family is None or kind.family == expected.family)
