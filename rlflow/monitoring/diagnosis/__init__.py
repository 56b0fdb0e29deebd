"""Explain from a run's records why the run learns little.

Each explanation names its evidence and a setting to change. The package has measures of recorded metrics,
rules with thresholds and the sources of the thresholds, and the sorted findings. A run's folder is read in
`rlflow.monitoring`. Limits on the run's speed are in `rlflow.runs.bounds`.
"""
