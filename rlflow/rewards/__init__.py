"""Scores responses with reward functions, which run in worker processes.

A worker process that misses a row's deadline is killed. If scoring a row fails, its score is missing, never
0. This package parses reward names, reads a reward function's file without importing it, and runs the pool of
workers. Model-based rewards, and the assignment of rewards to roles, are in `rlflow.config.roles.rewards`.
Workers import this package when they start, so importing it doesn't load torch.

The process pools of the standard library and of Pebble don't fit, for three reasons. They start workers with
multiprocessing, which passes on the whole environment. They exchange pickles, which a reward function could
forge. And their deadlines apply to a task, not to a row.
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
