"""The typed settings of each kind of call in a graph, and how a graph shows them."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, Literal

from rlflow.author.memory import Rule
from rlflow.author.methods import OFF

Value = bool | int | float | str | None | tuple[str, ...]
Pairs = tuple[tuple[str, Value], ...]  # name → value as the flow gives it
FILL = "fill."  # prefix of the columns that a `concat` fills, as a graph shows them
# how an update averages the values of a loss; if it is a number, the sum of the values is divided by it
Mean = Literal["tokens", "rows", "row-tokens"] | int | float


@dataclass(frozen=True)
class NodeOptions:
    """The settings of a call in a graph. This base class has none."""

    @property
    def shown(self) -> Pairs:
        """The settings as pairs of name and value, as a graph shows and stores them."""
        return tuple((name, plain(value)) for name, value in vars(self).items())


@dataclass(frozen=True)
class ShownOptions(NodeOptions):
    """Settings stored as pairs of name and value.

    Used for stages, whose settings are up to their authors, and for settings in which a secret is masked.
    """

    own: Pairs = ()

    @property
    def shown(self) -> Pairs:
        """The pairs of name and value, unchanged."""
        return self.own


@dataclass(frozen=True)
class GenerateOptions(NodeOptions):
    """The settings of a `generate` call, explained in ``rlflow.training.protocols.Sampling``."""

    samples: int
    max_tokens: int
    temperature: int | float | None = None  # None: a column of the call gives it
    top_p: int | float | None = None  # None: a column of the call gives it
    top_k: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    lengths: tuple[int, ...] = ()
    skip_special_tokens: bool = False
    environment: str | None = None  # description of the environment that answers the role between its turns

    @property
    def shown(self) -> Pairs:
        """The settings as pairs of name and value, leaving out those that are off."""
        return tuple(
            (name, value)
            for name, value in super().shown
            if value is not None and (name not in OFF or getattr(self, name))
        )


@dataclass(frozen=True)
class UpdateOptions(NodeOptions):
    """The settings of an `update` call."""

    epochs: int = 1
    minibatch: int | None = None  # rows of an optimizer step; None: all rows
    mean: Mean | tuple[Mean, ...] = "tokens"  # one average for all losses, or one for each
    scale: tuple[int | float, ...] | None = None  # with several losses: the factor of each
    # with several losses: the column that selects the rows of each
    where: tuple[str | None, ...] | None = None
    losses: tuple[str, ...] = ()  # with several losses: their names
    own: Pairs = ()  # settings of the losses

    @property
    def shown(self) -> Pairs:
        """The settings of the update, then those of its losses, as pairs of name and value.

        If there is only one loss, settings that only matter for several are left out.
        """
        hidden = {"own"} if self.losses else {"own", "scale", "where", "losses"}
        return (*(pair for pair in super().shown if pair[0] not in hidden), *self.own)


@dataclass(frozen=True)
class RepeatOptions(NodeOptions):
    """The settings of a `repeat` call."""

    groups: int  # number of groups to keep
    tries: int


@dataclass(frozen=True)
class AskOptions(NodeOptions):
    """The settings of an `ask` call."""

    roles: tuple[str, ...]  # roles that answer


@dataclass(frozen=True)
class EncodeOptions(NodeOptions):
    """The settings of an `encode` call."""

    roles: tuple[str, ...]  # the role whose tokenizer and chat template encode the text
    max_tokens: int | None = None  # maximum length of a response, with its end token; None: no limit


@dataclass(frozen=True)
class ChooseOptions(NodeOptions):
    """The settings of a `choose` call."""

    count: int  # number of rows with the highest values; 0: the rows that a bool column marks
    per: Literal["group", "batch"]


@dataclass(frozen=True)
class ReadOptions(NodeOptions):
    """The settings of a table's `read` call."""

    # why the call may miss the writes of the last iterations, when rows are sampled ahead of training
    stale_ok: str | None


@dataclass(frozen=True)
class WriteOptions(NodeOptions):
    """The settings of a table's `write` call: how it combines numbers, for each column that it reads."""

    rules: tuple[Rule, ...]
    rates: tuple[float, ...]  # of moving averages; 0 for other rules


@dataclass(frozen=True)
class DrawOptions(NodeOptions):
    """The settings of a buffer's `draw` call."""

    count: int | None  # number of groups or rows; None: all
    weight: str | None = None  # column of the weights; None: all equal
    strata: str | None = None  # column whose values are drawn in equal numbers
    newest: bool = False  # the newest instead of random ones


@dataclass(frozen=True)
class ConcatOptions(NodeOptions):
    """The settings of a `concat` call."""

    groups: Literal["prompts"] | None = None  # "prompts": rows of the same prompt form one group
    fill: Pairs = ()  # column → its value in the rows of batches without the column

    @property
    def shown(self) -> Pairs:
        """The settings as pairs of name and value: ``groups`` if it is set, then a ``fill.NAME`` per column."""
        groups: Pairs = (("groups", self.groups),) if self.groups else ()
        return (*groups, *((FILL + name, value) for name, value in self.fill))


@dataclass(frozen=True)
class FollowOptions(NodeOptions):
    """How the weights of a role follow those of another."""

    follows: str  # the other role
    mix: int | float  # share of the way; 1 copies the weights


AnyOptions = (
    NodeOptions
    | ShownOptions
    | GenerateOptions
    | UpdateOptions
    | RepeatOptions
    | AskOptions
    | EncodeOptions
    | ChooseOptions
    | ReadOptions
    | WriteOptions
    | DrawOptions
    | ConcatOptions
    | FollowOptions
)


def plain(value: Any) -> Value:
    """Return a setting's value as a graph stores it.

    Numbers and text stay as they are. Other values are replaced with their name or repr.
    """
    if isinstance(value, int) and not -(2**63) <= value < 2**63:  # the wire format holds 64 bits
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
        return tuple(value)
    with contextlib.suppress(AttributeError):
        return str(value.__qualname__)
    return repr(value)
