"""The arithmetic that algorithms share, written as in the papers.

There are functions of tensors, and stages built from them: advantages, divergences, clipped gains, importance
weights and group statistics. Losses and settings are in each algorithm's own file in `algorithms/`.

Masks are bool [rows, T]. Masked-out entries are replaced with ``torch.where`` instead of being multiplied by
0, so NaN in the padding has no effect.
"""

from rlflow.author.functional.credit import gae, place_last, reward_to_go
from rlflow.author.functional.divergence import adapted_beta, kl, kl_penalty
from rlflow.author.functional.gains import (
    clipped_gain,
    drawn_tokens,
    geometric_gain,
    largest_tokens,
    token_covariance,
)
from rlflow.author.functional.groups import (
    compare,
    group_mean,
    group_std,
    leave_one_out,
    length_weighted_mean,
    pass_at_k,
)
from rlflow.author.functional.importance import (
    importance_ratio,
    masked_weights,
    rejected_weights,
    truncated_weights,
)
from rlflow.author.functional.shaping import stop_penalty
from rlflow.author.functional.statistics import masked_mean, row_mean, row_sum, whiten

__all__ = [
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
]
