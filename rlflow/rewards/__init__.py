"""Score responses with reward functions, in processes that are killed at a deadline.

A failed score is missing, never 0. The package parses reward names, reads a reward file without importing it,
and keeps the pool of scoring processes, with a deadline for each row. Model-based rewards and the assignment
of rewards to roles are in `rlflow.config.roles.rewards`; metrics of missing scores are also elsewhere.
Importing this package does not load torch, since worker processes start through it.

Pools of the standard library and of Pebble do not fit. They start workers by multiprocessing, which inherits
the complete environment. They exchange pickles, which a reward's code could forge. Their deadlines apply to a
task instead of a row.
"""

from rlflow.rewards.reward import Reward, Scores, Sum, bind, score_all
from rlflow.rewards.reward_pool import RewardPool
from rlflow.rewards.reward_spec import RewardSpec, from_function, parse_reward
from rlflow.rewards.text import reads
from rlflow.rewards.worker_pool import in_worker

__all__ = [
    "Reward",
    "RewardPool",
    "RewardSpec",
    "Scores",
    "Sum",
    "bind",
    "from_function",
    "in_worker",
    "parse_reward",
    "reads",
    "score_all",
]
