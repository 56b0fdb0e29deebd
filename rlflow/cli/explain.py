"""`rlflow explain`."""

from __future__ import annotations

import json

from rlflow.monitoring.explained import as_json, explanation
from rlflow.monitoring.history import find_run
from rlflow.monitoring.tables import output, plain


def explain_run(text: str, wants_json: bool) -> int:
    """Print why a run learns little and what bounded its time. Raises PlanError where there is no such run."""
    folder = find_run(text)
    if wants_json:
        print(json.dumps(as_json(folder)))
    else:
        output(map(plain, explanation(folder)))
    return 0
