"""Rewards: what judges a response. User code runs in processes that are killed at their deadline; a failure
is missing, never 0.

Here: naming a reward, reading its file's text, the pool of processes that score rows, each with a deadline
for each row. Not here: rewards that are models (`rlflow.config.roles.rewards`), which rewards a role has (the
same), metrics of missing scores. Importing this package loads no torch: the worker processes start through
it.

The pool is our own, since pools of the libraries (Pebble, concurrent.futures) start workers by
multiprocessing: these inherit the whole environment, send pickles, which a reward's code could forge, both
ways, and have a deadline for a task instead of one for each row.
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
