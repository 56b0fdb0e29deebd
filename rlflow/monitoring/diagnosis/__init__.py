"""Rules that explain from a run's records why the run learns little, each with its evidence and the setting
to change.

Here: measures of recorded metrics, the rules with their thresholds and the sources of the thresholds, and the
sorted findings. Not here: reading a run's folder (`rlflow.monitoring`), limits on the run's speed
(`rlflow.runs.bounds`), and proofs before a run.
"""
