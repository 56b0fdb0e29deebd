"""Loads prompts, completions and preference pairs, and turns them into rows.

This package reads and checks records, renders chat templates in a separate process, encodes prompts, and
describes the scorer that comes with a data set. The choice of a run's data set is in
`rlflow.config.roles.opened_data`, batches are in `rlflow.author.batch`, and rewards in `rlflow.rewards`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlflow.data.dataset import Dataset
    from rlflow.data.encode import Wording
    from rlflow.data.mixed import prompts_of
    from rlflow.data.prompts import Prompts
    from rlflow.data.source import open_data

_LAZY = {
    "Dataset": "dataset",
    "Prompts": "prompts",
    "Wording": "encode",
    "open_data": "source",
    "prompts_of": "mixed",
}

__all__ = ["Dataset", "Prompts", "Wording", "open_data", "prompts_of"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"rlflow.data.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'rlflow.data' has no attribute '{name}'")
