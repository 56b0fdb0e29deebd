"""``@stage``: a function of columns with a dispatch mode.

Called with a batch, a stage returns a batch. Called with tensors, it is just the plain function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, overload

from rlflow.author import signature, source_lines
from rlflow.author.columns import Kind, checked_kinds, standard_kind
from rlflow.author.dispatch import DP_COMPUTE, Dispatch
from rlflow.author.scope import batch_like, symbolic
from rlflow.author.signature import Signature
from rlflow.errors import FlowError, Place, Problem

Gives = str | tuple[str, ...] | Mapping[str, Kind | None]


@dataclass(frozen=True, eq=False)
class Stage:
    """The result of ``@stage``."""

    function: Callable[..., Any]
    gives: dict[str, Kind | None]  # column → its kind; None: the kind of the returned values
    dispatch: Dispatch = DP_COMPUTE  # how its rows are split over the ranks of a pool
    on: str | None = None  # the role whose model the stage uses
    rows: Literal["row", "group"] = "row"  # "group": a call must not separate the rows of a group
    timeout: float = 300.0  # maximum number of seconds that a call may take
    pure: bool = True  # False: it has side effects, and is never called again after a failure

    def __post_init__(self) -> None:
        vars(self).update(
            __name__=self.function.__name__, __doc__=self.function.__doc__, __wrapped__=self.function
        )

    def __call__(self, *arguments: Any, gives: str | tuple[str, ...] | None = None, **settings: Any) -> Any:
        """Call the stage on a batch, and return a batch of the columns that it computes.

        ``gives``: new names for these columns, in order. ``every`` and ``after`` among the settings say in
        which iterations the call is due, unless the stage has settings of these names. If the first argument
        isn't a batch, this just calls the plain function.
        """
        if len(arguments) == 1 and batch_like(arguments[0]):
            from rlflow.author.scope import current

            names = (gives,) if isinstance(gives, str) else gives
            return current().stage(self, arguments[0], names, settings)
        if any(symbolic(argument) for argument in arguments):
            raise FlowError(
                Problem(
                    "not-a-batch",
                    f"stage '{self.name}' needs one batch",
                    source_lines.call_place(),
                    self.place,
                    found=", ".join(type(argument).__name__ for argument in arguments),
                    expected="a batch",
                    remedy=f"write {self.name}(batch): the parameter names select the columns; pass settings "
                    "by name",
                )
            )
        return self.function(*arguments, **settings)

    @property
    def name(self) -> str:
        """The name of the stage's function."""
        return self.function.__name__

    @cached_property
    def signature(self) -> Signature:
        """The columns and settings that the stage's function takes."""
        return signature.read(self.function, skip=1 if self.on else 0)

    @property
    def place(self) -> Place:
        """The file and line where the stage is defined."""
        return source_lines.definition_place(self.function)

    @property
    def digest(self) -> str:
        """Identifies the code of the stage's function and of the functions that it uses."""
        return source_lines.digest(self.function)

    @property
    def draws(self) -> bool:
        """True if the stage draws random numbers, that is, if it has the parameter ``generator``."""
        return "generator" in self.signature.settings


@overload
def stage(function: Callable[..., Any], /) -> Stage: ...
@overload
def stage(
    *,
    gives: Gives = (),
    dispatch: Dispatch = DP_COMPUTE,
    on: str | None = None,
    rows: Literal["row", "group"] = "row",
    timeout: float = 300.0,
    pure: bool = True,
) -> Callable[[Callable[..., Any]], Stage]: ...
def stage(
    function: Callable[..., Any] | None = None,
    /,
    *,
    gives: Gives = (),
    dispatch: Dispatch = DP_COMPUTE,
    on: str | None = None,
    rows: Literal["row", "group"] = "row",
    timeout: float = 300.0,
    pure: bool = True,
) -> Any:
    """Make a stage from a function of columns.

    gives: the columns that the function returns, as names of standard columns or as name → kind, with kinds
    such as ``row(torch.float32)``.

    dispatch: DP_COMPUTE, ALL, RANK0 or a registered mode.

    on: a role, whose Trainer is passed as the function's first parameter.

    rows="group": each call gets only complete groups, whose rows are adjacent.

    timeout: how many seconds a call may take.

    pure=False: the stage has side effects, so it is never retried.

    Raises TypeError for other values.
    """

    if not isinstance(dispatch, Dispatch):
        raise TypeError(
            f"@stage(dispatch={dispatch!r}): found an unknown mode, expected DP_COMPUTE, ALL or RANK0, "
            "imported from rlflow"
        )
    if rows not in ("row", "group"):
        raise TypeError(f"@stage(rows={rows!r}): expected 'row' or 'group'")
    if not timeout > 0:
        raise TypeError(f"@stage(timeout={timeout!r}): expected seconds above 0")
    kinds = given_kinds(gives)

    def make(function: Callable[..., Any]) -> Stage:
        return Stage(function, kinds, dispatch, on, rows, timeout, pure)

    return make(function) if function is not None else make


def given_kinds(gives: Gives) -> dict[str, Kind | None]:
    """Return the columns that a stage returns, as name → kind.

    A column given only by name has its standard kind, or None if it isn't a standard column.
    """
    if isinstance(gives, Mapping):
        return checked_kinds("@stage(gives=…)", gives)
    return {name: standard_kind(name) for name in ((gives,) if isinstance(gives, str) else gives)}
