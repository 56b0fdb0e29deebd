"""Computed settings: numbers that a flow computes, read from columns and checked against their range."""

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
    """Return the settings with numbers from setting columns, and the batch without these columns.

    ``signature``: the signature of the stage or loss; None for `generate`. Raises ValueError for a number out
    of its range.
    """
    columns = [name for name in batch.data if name.startswith(SETTING)]
    if not columns:
        return settings, batch
    numbers = {name.removeprefix(SETTING): float(batch.data[name].value) for name in columns}
    for name, number in numbers.items():
        check_range(name, number, signature)
    return {**settings, **numbers}, batch.drop(*columns)


def sampling_of(options: GenerateOptions, numbers: Mapping[str, float] = MappingProxyType({})) -> Sampling:
    """Return the sampling settings of a call. ``numbers``: values of settings that are columns."""
    return Sampling(
        **{name: value for name, value in {**vars(options), **numbers}.items() if name != "environment"}
    )


def check_range(name: str, number: float, signature: Signature | None) -> None:
    """Check a number against the range of its setting. Raises ValueError if it is out of range.

    If ``signature`` is None, the setting and its range are those of `generate`. Otherwise the range is the
    setting's annotation in a stage or loss. Without an annotation, the number must be finite.
    """
    if signature is None:
        expected = "" if methods.GENERATE[name].test(number) else methods.GENERATE[name].expected
    else:
        expected = _unfit(signature.types.get(name, float), number)
    if expected:
        raise ValueError(f"setting '{name}': found {number:g}, expected {expected}")


def _unfit(type_: Any, number: float) -> str:
    """Return the expected range if the number is out of range, otherwise an empty text."""
    if not math.isfinite(number):
        return "a finite number"
    try:
        parse(type_, number)
    except ValueError as error:
        return str(error)
    return ""


def as_numbers(settings: Mapping[str, Any], takes: Any, signature: Signature | None) -> dict[str, Any]:
    """Return the settings of an eager call, with 0-d tensors converted to numbers.

    A setting is converted only if ``takes(name)`` is true. Raises ValueError for a number out of its range.
    """
    numbers = {
        name: float(value)
        for name, value in settings.items()
        if isinstance(value, Tensor) and value.ndim == 0 and takes(name)
    }
    for name, number in numbers.items():
        check_range(name, number, signature)
    return {**settings, **numbers}
