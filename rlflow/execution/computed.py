"""Settings whose numbers are computed: taken from the columns of a call, and held to their ranges."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from rlflow.author import verbs
from rlflow.author.batch import Batch
from rlflow.author.node_options import GenerateOptions
from rlflow.author.settings import parse
from rlflow.author.signature import Signature
from rlflow.compiler.graph.model import SETTING
from rlflow.training.protocols import Sampling


def with_numbers(
    settings: Mapping[str, Any], batch: Batch, signature: Signature | None
) -> tuple[Mapping[str, Any], Batch]:
    """The settings of a call with the numbers of those that are columns, and the batch without these columns.
    ``signature``: of a stage or loss; None of `generate`. Raises ValueError for a number out of its range."""
    columns = [name for name in batch.data if name.startswith(SETTING)]
    if not columns:
        return settings, batch
    numbers = {name.removeprefix(SETTING): float(batch.data[name].value) for name in columns}
    for name, number in numbers.items():
        check_range(name, number, signature)
    return {**settings, **numbers}, batch.drop(*columns)


def sampling_of(options: GenerateOptions, numbers: Mapping[str, float] = MappingProxyType({})) -> Sampling:
    """How a call samples. ``numbers``: of settings that are columns."""
    return Sampling(
        **{name: value for name, value in {**vars(options), **numbers}.items() if name != "environment"}
    )


def check_range(name: str, number: float, signature: Signature | None) -> None:
    """Raises ValueError for a number out of the range of a setting: that of `generate`, or of the annotation
    of a stage or loss; any other has to be finite."""
    if signature is None:
        expected = "" if verbs.GENERATE[name].test(number) else verbs.GENERATE[name].expected
    else:
        expected = _unfit(signature.types.get(name, float), number)
    if expected:
        raise ValueError(f"setting '{name}': found {number:g}, expected {expected}")


def _unfit(type_: Any, number: float) -> str:
    """A text about the range that a number is out of; empty where it is in it."""
    if not math.isfinite(number):
        return "a finite number"
    try:
        parse(type_, number)
    except ValueError as error:
        return str(error)
    return ""


def as_numbers(settings: Mapping[str, Any], takes: Any, signature: Signature | None) -> dict[str, Any]:
    """The settings of an eager call, where those that may be columns (``takes``) and are 0-d tensors become
    numbers. Raises ValueError for one out of its range."""
    numbers = {
        name: float(value)
        for name, value in settings.items()
        if isinstance(value, Tensor) and value.ndim == 0 and takes(name)
    }
    for name, number in numbers.items():
        check_range(name, number, signature)
    return {**settings, **numbers}
