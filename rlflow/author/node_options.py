"""The settings of each call of a graph, with their types; and the same settings as a graph shows and stores
them."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, Literal

from rlflow.author.verbs import OFF

Value = bool | int | float | str | None | tuple[str, ...]
Pairs = tuple[tuple[str, Value], ...]  # name → value as the flow gives it
# how an update averages the values of a loss; a number divides their sum
Mean = Literal["tokens", "rows", "row-tokens"] | int | float


@dataclass(frozen=True)
class NodeOptions:
    """The settings of a call. A call without settings has this class itself."""

    @property
    def shown(self) -> Pairs:
        """The settings as a graph shows and stores them."""
        return tuple((name, plain(value)) for name, value in vars(self).items())


@dataclass(frozen=True)
class ShownOptions(NodeOptions):
    """Settings of a stage, whose types only the stage knows; or settings of a verb in which a secret is
    masked."""

    own: Pairs = ()

    @property
    def shown(self) -> Pairs:
        """The settings, which are as they are shown."""
        return self.own


@dataclass(frozen=True)
class GenerateOptions(NodeOptions):
    """Settings of `generate`, as ``rlflow.training.protocols.Sampling`` explains them."""

    samples: int
    max_tokens: int
    temperature: int | float | None = None  # None: a column of the call gives it
    top_p: int | float | None = None  # likewise
    top_k: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    lengths: tuple[int, ...] = ()
    skip_special_tokens: bool = False
    environment: str | None = None  # described; what answers the role between its turns

    @property
    def shown(self) -> Pairs:
        """Those that say something."""
        return tuple(
            (name, value)
            for name, value in super().shown
            if value is not None and (name not in OFF or getattr(self, name))
        )


@dataclass(frozen=True)
class UpdateOptions(NodeOptions):
    """Settings of `update`."""

    epochs: int = 1
    minibatch: int | None = None  # rows of an optimizer step; None: all rows
    mean: Mean | tuple[Mean, ...] = "tokens"  # one for all losses, or one for each
    after: int = 0  # iterations in which nothing is learned yet
    scale: tuple[int | float, ...] | None = None  # of several losses the factor of each
    where: tuple[str | None, ...] | None = None  # of several losses the column of each one's rows
    losses: tuple[str, ...] = ()  # of several losses their names
    own: Pairs = ()  # settings of the losses

    @property
    def shown(self) -> Pairs:
        """Those of several losses only if there are several, then those of the losses."""
        hidden = {"own"} if self.losses else {"own", "scale", "where", "losses"}
        return (*(pair for pair in super().shown if pair[0] not in hidden), *self.own)


@dataclass(frozen=True)
class RepeatOptions(NodeOptions):
    """Settings of `repeat`."""

    groups: int  # that are to be kept
    tries: int


@dataclass(frozen=True)
class AskOptions(NodeOptions):
    """Settings of `ask`."""

    roles: tuple[str, ...]  # that answer


@dataclass(frozen=True)
class ChooseOptions(NodeOptions):
    """Settings of `choose`."""

    count: int  # rows with the highest numbers; 0: the rows that a bool column marks
    per: Literal["group", "batch"]


AnyOptions = (
    NodeOptions | ShownOptions | GenerateOptions | UpdateOptions | RepeatOptions | AskOptions | ChooseOptions
)


def plain(value: Any) -> Value:
    """A setting as the graph stores it: numbers and text as they are, anything else by its name or repr."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:  # more than the wire format holds
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
        return tuple(value)
    with contextlib.suppress(AttributeError):
        return str(value.__qualname__)
    return repr(value)
