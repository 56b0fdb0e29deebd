"""Encode a run's state, which consists of plain values, as JSON. Floats are restored bit for bit."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Any

from rlflow.errors import PlanError

FLOAT = "$float"  # {"$float": "7ff8000000000000"}: the bits of a float that JSON cannot represent
DEPTH = 64
BITS = 8192  # maximum bits of an integer; a random generator's state has a few hundred


def plain(value: Any, where: str = "state", depth: int = 0) -> Any:
    """Return a deep copy of ``value`` with tuples turned into lists.

    ``where``: the path of ``value`` within the state, for error messages. ``depth``: its nesting level.
    Raises PlanError if JSON can't represent some value.
    """
    if depth > DEPTH:
        raise _unfit(where, "a value that is nested too deeply", f"at most {DEPTH} levels")
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, float):
        return float(value)  # also converts numpy's float64, which prints differently
    if isinstance(value, int):
        if value.bit_length() > BITS:
            raise _unfit(where, f"an integer of {value.bit_length()} bits", f"at most {BITS}")
        return int(value)
    if isinstance(value, Mapping):
        return _mapping(value, where, depth)
    if isinstance(value, list | tuple):
        return [plain(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)]
    raise _unfit(where, type(value).__name__, "None, bool, int, float, str, a list or a mapping")


def _mapping(value: Mapping[Any, Any], where: str, depth: int) -> dict[str, Any]:
    for key in value:
        if not isinstance(key, str) or key == FLOAT:
            raise _unfit(where, f"the key {key!r}", f"text other than '{FLOAT}'")
    return {str(key): plain(item, f"{where}.{key}", depth + 1) for key, item in value.items()}


def _unfit(where: str, value: str, expected: str) -> PlanError:
    return PlanError.of(
        "checkpoint-state",
        f"{where} cannot be written as JSON",
        found=value,
        expected=expected,
        remedy="convert the value, for example with str(), int() or .tolist()",
    )


def dumps(value: Any) -> bytes:
    """Encode plain values as ASCII JSON.

    Floats survive the round trip exactly, because Python writes enough digits. NaN and infinity are written
    as their bits.
    """
    return json.dumps(_spelled(value), ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode(
        "ascii"
    )


def loads(data: bytes) -> Any:
    """Decode a value that ``dumps`` returned.

    Raises ValueError for anything else, for example JSON with duplicate keys, NaN, infinity or too many
    levels.
    """
    try:
        return json.loads(data.decode("ascii"), object_pairs_hook=_object, parse_constant=_refused)
    except (RecursionError, TypeError, struct.error) as error:
        raise ValueError(str(error)) from error


def _spelled(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {FLOAT: struct.pack(">d", value).hex()}
    if isinstance(value, Mapping):
        return {key: _spelled(item) for key, item in value.items()}
    return [_spelled(item) for item in value] if isinstance(value, list) else value


def _object(pairs: list[tuple[str, Any]]) -> Any:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a key is given twice")
    if FLOAT in values:
        return struct.unpack(">d", bytes.fromhex(values[FLOAT]))[0]
    return values


def _refused(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")
