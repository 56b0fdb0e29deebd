"""Variables for the chat template, from ``--data.template_kwargs`` or ``--data.template_kwargs.NAME``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rlflow.errors import PlanError

TEMPLATE = "template_kwargs"  # a JSON object; with .NAME, a single variable


def template_kwargs(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables for the chat template. ``values`` holds the settings ``--data.NAME`` by name.

    Raises PlanError if ``template_kwargs`` isn't a JSON object.
    """
    whole = values.get(TEMPLATE) or {}
    if isinstance(whole, str):
        try:
            whole = json.loads(whole)
        except ValueError:
            whole = None
    if not isinstance(whole, Mapping):
        raise PlanError.of(
            "flag",
            f"--data.{TEMPLATE} must be a JSON object",
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
    """Convert a string to an int, float or bool if it contains one.

    Other strings and values are returned unchanged.
    """
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
