"""Score responses with reward functions, in processes that are killed at a deadline.

If scoring a row fails, its score is missing, never 0. The package parses reward names, reads a reward's file
without importing it, and runs the pool of scoring processes, with a deadline for each row. Model-based
rewards and the assignment of rewards to roles are in `rlflow.config.roles.rewards`. Importing this package
does not load torch, because worker processes import it at their start.

The process pools of the standard library and of Pebble are not used, for three reasons. They start workers
with multiprocessing, which passes on the complete environment. They exchange pickles, which a reward's code
could forge. Their deadlines apply to a task instead of a row.
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
