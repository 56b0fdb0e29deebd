"""Environments that come with rlflow: `--env retry`, `--env search`, `--env python`.

Each module has one class, written like a user's own environment.
"""
