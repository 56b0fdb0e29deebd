"""rlflow: reinforcement-learning algorithms for language models as dataflow graphs.

This package exports everything you need to write an algorithm or to start runs from Python. It also contains
modules that several packages share. Algorithms and backends are subpackages (`rlflow.algorithms`,
`rlflow.backends`). docs/architecture.md shows all packages. Names that need torch are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rlflow.author.columns import columns, group, prompt, row, scalar, text, token
from rlflow.author.dispatch import ALL, DP_COMPUTE, RANK0, register_dispatch
from rlflow.author.flow import flow, repeat
from rlflow.author.loss import loss
from rlflow.author.memory import buffer, ema, follow, table
from rlflow.author.rows import ask, choose, concat, encode
from rlflow.author.scope import Engines, register
from rlflow.author.stage import stage
from rlflow.author.turn import Turn
from rlflow.errors import FlowError, PlanError, StageError
from rlflow.extras import VERSION

if TYPE_CHECKING:
    from rlflow.author.batch import Batch
    from rlflow.author.functional import (
        adapted_beta,
        clipped_gain,
        compare,
        drawn_tokens,
        gae,
        geometric_gain,
        group_mean,
        group_std,
        importance_ratio,
        kl,
        kl_penalty,
        largest_tokens,
        leave_one_out,
        length_weighted_mean,
        masked_mean,
        masked_weights,
        pass_at_k,
        place_last,
        rejected_weights,
        reward_to_go,
        row_mean,
        row_sum,
        stop_penalty,
        token_covariance,
        truncated_weights,
        whiten,
    )
    from rlflow.processes.clients.http import post
    from rlflow.runs.api import roles
    from rlflow.runs.run import run

_LAZY = {
    "Batch": "rlflow.author.batch",
    "post": "rlflow.processes.clients.http",
    "roles": "rlflow.runs.api",
    "run": "rlflow.runs.run",
    **dict.fromkeys(
        [
            "adapted_beta",
            "clipped_gain",
            "compare",
            "drawn_tokens",
            "gae",
            "geometric_gain",
            "group_mean",
            "group_std",
            "importance_ratio",
            "kl",
            "kl_penalty",
            "largest_tokens",
            "leave_one_out",
            "length_weighted_mean",
            "masked_mean",
            "masked_weights",
            "pass_at_k",
            "place_last",
            "rejected_weights",
            "reward_to_go",
            "row_mean",
            "row_sum",
            "stop_penalty",
            "token_covariance",
            "truncated_weights",
            "whiten",
        ],
        "rlflow.author.functional",
    ),
}

__version__ = VERSION
__all__ = [
    "ALL",
    "DP_COMPUTE",
    "RANK0",
    "Batch",
    "FlowError",
    "PlanError",
    "StageError",
    "Turn",
    "adapted_beta",
    "ask",
    "buffer",
    "choose",
    "clipped_gain",
    "columns",
    "compare",
    "concat",
    "drawn_tokens",
    "ema",
    "encode",
    "flow",
    "follow",
    "gae",
    "geometric_gain",
    "group",
    "group_mean",
    "group_std",
    "importance_ratio",
    "kl",
    "kl_penalty",
    "largest_tokens",
    "leave_one_out",
    "length_weighted_mean",
    "loss",
    "masked_mean",
    "masked_weights",
    "pass_at_k",
    "place_last",
    "post",
    "prompt",
    "register_dispatch",
    "rejected_weights",
    "repeat",
    "reward_to_go",
    "roles",
    "row",
    "row_mean",
    "row_sum",
    "run",
    "scalar",
    "stage",
    "stop_penalty",
    "table",
    "text",
    "token",
    "token_covariance",
    "truncated_weights",
    "whiten",
]

register(
    Engines(
        interpreter=lambda: importlib.import_module("rlflow.execution.eager").Eager(),
        tracer=lambda: importlib.import_module("rlflow.compiler.trace.compile").compile_flow,
        exports=tuple(__all__),
    )
)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'rlflow' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
