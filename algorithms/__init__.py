"""Algorithms, one file each: settings, stages, losses and one flow, which import from `rlflow` alone.

Here: what differs from algorithm to algorithm. Not here: arithmetic that several share
(`rlflow.author.functional`), and anything that runs them.
"""
