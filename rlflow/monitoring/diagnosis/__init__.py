"""Rules that explain from a run's records why it learns little, each with its evidence and the setting to
change.

Here: measures of recorded metrics, the table of rules with their thresholds and the sources of these,
findings in order. Not here: reading a run's folder (`rlflow.monitoring`), limits of its speed
(`rlflow.runs.bounds`), proofs before a run.
"""
