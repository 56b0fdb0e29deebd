"""Computed settings: settings of a call whose value is a column.

The numbers are checked against the setting's allowed range.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from rlflow.author import methods
from rlflow.author.batch import Batch
from rlflow.author.node_options import GenerateOptions
from rlflow.author.settings import parse
from rlflow.author.signature import Signature
from rlflow.compiler.graph.model import SETTING
from rlflow.training.protocols import Sampling


def with_numbers(
    settings: Mapping[str, Any], batch: Batch, signature: Signature | None
) -> tuple[Mapping[str, Any], Batch]:
    """Replace the settings that are columns with numbers, and remove these columns from the batch.

    Returns the settings and the batch. ``signature``: the signature of the stage or loss, or None for
    `generate`. Raises ValueError if a number is out of range.
    """
    columns = [name for name in batch.data if name.startswith(SETTING)]
    if not columns:
        return settings, batch
    numbers = {name.removeprefix(SETTING): float(batch.data[name].value) for name in columns}
    for name, number in numbers.items():
        check_range(name, number, signature)
    return {**settings, **numbers}, batch.drop(*columns)


def sampling_of(options: GenerateOptions, numbers: Mapping[str, float] = MappingProxyType({})) -> Sampling:
    """Return the sampling settings of a `generate` call.

    ``numbers``: the values of settings that are columns.
    """
    return Sampling(
        **{name: value for name, value in {**vars(options), **numbers}.items() if name != "environment"}
    )


def check_range(name: str, number: float, signature: Signature | None) -> None:
    """Raise ValueError if a computed number is outside the range of its setting.

    If ``signature`` is None, the setting belongs to `generate`. Otherwise the setting's annotation in the
    stage or loss gives the range; without an annotation, any finite number is allowed.
    """
    if signature is None:
        expected = "" if methods.GENERATE[name].test(number) else methods.GENERATE[name].expected
    else:
        expected = _unfit(signature.types.get(name, float), number)
    if expected:
        raise ValueError(f"setting '{name}': found {number:g}, expected {expected}")


def _unfit(type_: Any, number: float) -> str:
    """Return the allowed range as text if the number is outside it, or an empty string."""
    if not math.isfinite(number):
        return "a finite number"
    try:
        parse(type_, number)
    except ValueError as error:
        return str(error)
    return ""


def as_numbers(settings: Mapping[str, Any], takes: Any, signature: Signature | None) -> dict[str, Any]:
    """Convert the 0-d tensors among the settings of an eager call to numbers.

    Only settings for which ``takes(name)`` is True are converted. Raises ValueError if a number is out of
    range.
    """
    numbers = {
        name: float(value)
        for name, value in settings.items()
        if isinstance(value, Tensor) and value.ndim == 0 and takes(name)
    }
    for name, number in numbers.items():
        check_range(name, number, signature)
    return {**settings, **numbers}
