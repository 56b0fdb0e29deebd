"""Explain from a run's records why it learns little.

Each explanation names its evidence and a setting to change. This package has the measures computed from
recorded metrics, the rules with their thresholds and where these come from, and the sorted findings.
`rlflow.monitoring` reads the run's folder, and `rlflow.runs.bounds` deals with what limits its speed.
"""
