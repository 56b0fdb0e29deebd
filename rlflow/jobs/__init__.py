"""Jobs of one's own that ship as examples: scripts that call groups of workers in an order of their own.

Here: PPO as such a script (`ppo_by_hand`). Not here: what a job is (`rlflow.cluster.job`), runs of flows (`rlflow.runs`).
"""
