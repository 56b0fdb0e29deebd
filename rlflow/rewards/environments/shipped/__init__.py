"""Environments that come with rlflow, named without a file: `--env retry`, `--env search`, `--env python`.

Here: one class a module, written as a user's own would be.
Not here: anything that a user's own environment could not do.
"""
