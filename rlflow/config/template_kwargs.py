"""Variables of the chat template, as ``--data.template_kwargs`` and ``--data.template_kwargs.NAME`` give
them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rlflow.errors import PlanError

TEMPLATE = "template_kwargs"  # as a JSON object, or each variable by its name behind a dot


def template_kwargs(values: Mapping[str, Any]) -> dict[str, Any]:
    """The variables of the chat template among the values of ``--data.NAME``. Raises PlanError for what is no
    JSON object."""
    whole = values.get(TEMPLATE) or {}
    if isinstance(whole, str):
        try:
            whole = json.loads(whole)
        except ValueError:
            whole = None
    if not isinstance(whole, Mapping):
        raise PlanError.of(
            "flag",
            f"--data.{TEMPLATE} is a JSON object",
            found=str(values[TEMPLATE]),
            expected='{"NAME": VALUE, …}',
            remedy=f"--data.{TEMPLATE} '{{\"enable_thinking\": false}}'",
        )
    return {
        **whole,
        **{
            name.partition(".")[2]: number(value)
            for name, value in values.items()
            if name.startswith(f"{TEMPLATE}.")
        },
    }


def number(value: Any) -> Any:
    """A value from text: an int, a float, true or false, or the text."""
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value
