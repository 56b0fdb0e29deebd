"""Why a run learns little: rules over what it recorded, in words, with the evidence and the setting that
would change it.

Here: measures of recorded metrics, the table of rules with their thresholds and where these are from,
findings in order. Not here: reading a run's folder (`rlflow.monitoring`), what bounded its time
(`rlflow.runs.bounds`), proofs before a run.
"""
