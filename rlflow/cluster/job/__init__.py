"""Jobs of one's own: roles that are classes of the user, on groups of Ray workers, called from an ordinary
script.

Here: declaring roles and what they need, starting and ending them, typed calls to their ranks, and what a
rank knows of itself. Not here: how a call travels (`rlflow.cluster.rpc`), runs of flows (`rlflow.runs`),
launching on other machines (`rlflow.cluster.submit`).
"""
