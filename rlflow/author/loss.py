"""``@loss``: a function that takes model outputs and columns, and returns values and metrics."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, overload

from rlflow.author import signature, source_lines
from rlflow.author.signature import Signature
from rlflow.errors import Place

Quantity = Literal["logprobs", "entropy", "values", "scores"]


@dataclass(frozen=True, eq=False)
class Loss:
    """The result of ``@loss``."""

    function: Callable[..., Any]
    # quantities that the model computes for the loss; the first one determines the model's head
    new: tuple[Quantity, ...] = ("logprobs",)
    rows: Literal["row", "group"] = "row"
    stale_ok: str = ""  # why rows sampled with older weights need no correction in this loss
    unrewarded: str = ""  # why no reward has to reach this loss

    def __post_init__(self) -> None:
        vars(self).update(
            __name__=self.function.__name__, __doc__=self.function.__doc__, __wrapped__=self.function
        )

    def __call__(self, new: Any, *columns: Any, **settings: Any) -> tuple[Any, dict[str, Any]]:
        """Call the loss's function and return (value, metrics).

        If it returns just a value, the metrics are empty.
        """
        result = self.function(new, *columns, **settings)
        return result if isinstance(result, tuple) else (result, {})

    @property
    def name(self) -> str:
        """The name of the loss's function."""
        return self.function.__name__

    @property
    def head(self) -> Quantity:
        """The head that the model needs for this loss. Entropy uses the same head as log-probs."""
        return "logprobs" if self.new[0] == "entropy" else self.new[0]

    @property
    def key(self) -> Hashable:
        """A key for comparing losses, valid within this process."""
        return id(self)

    @cached_property
    def signature(self) -> Signature:
        """The columns and settings that the loss's function takes after ``new``."""
        return signature.read(self.function, skip=1)

    @property
    def place(self) -> Place:
        """The file and line where the loss is defined."""
        return source_lines.definition_place(self.function)

    @property
    def digest(self) -> str:
        """Identifies the code of the loss's function and of the functions that it uses."""
        return source_lines.digest(self.function)


@overload
def loss(function: Callable[..., Any], /) -> Loss: ...
@overload
def loss(
    *,
    new: Quantity | tuple[Quantity, ...] = "logprobs",
    rows: Literal["row", "group"] = "row",
    stale_ok: str = "",
    unrewarded: str = "",
) -> Callable[[Callable[..., Any]], Loss]: ...
def loss(
    function: Callable[..., Any] | None = None,
    /,
    *,
    new: Quantity | tuple[Quantity, ...] = "logprobs",
    rows: Literal["row", "group"] = "row",
    stale_ok: str = "",
    unrewarded: str = "",
) -> Any:
    """Make a loss from a function ``f(new, columns…, *, settings) -> (value, metrics)``.

    new: what the model computes for the loss: "logprobs" [rows, T], "values" [rows, T], "scores" [rows], or
    ("logprobs", "entropy").

    rows="group": the loss gets complete groups, such as pairs, whose rows are adjacent.

    stale_ok: a sentence on why this loss needs no correction for rows sampled with older weights. `rlflow
    check` prints it.

    unrewarded: a sentence on why the flow's rewards don't have to reach this loss. `rlflow check` prints it.

    Raises TypeError for other values.
    """
    names = (new,) if isinstance(new, str) else tuple(new)
    unknown = [name for name in names if name not in ("logprobs", "entropy", "values", "scores")]
    if unknown:
        raise TypeError(
            f"@loss(new={new!r}): found {unknown[0]!r}, expected 'logprobs', 'values', 'scores' or "
            "('logprobs', 'entropy')"
        )

    if rows not in ("row", "group"):
        raise TypeError(f"@loss(rows={rows!r}): expected 'row' or 'group'")

    if not isinstance(stale_ok, str):
        raise TypeError(
            f"@loss(stale_ok={stale_ok!r}): expected the reason in words, such as 'only rows of the "
            "newest weights are kept'"
        )

    if not isinstance(unrewarded, str):
        raise TypeError(
            f"@loss(unrewarded={unrewarded!r}): expected the reason in words, such as 'it keeps the "
            "model close to its data'"
        )

    def make(function: Callable[..., Any]) -> Loss:
        return Loss(function, names, rows, stale_ok, unrewarded)

    return make(function) if function is not None else make
