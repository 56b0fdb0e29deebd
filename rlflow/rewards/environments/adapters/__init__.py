"""Adapters for environments from other libraries.

Users name these environments with `--env`: `textarena:ID`, `skyrl_gym:ID`, `openenv:URL` and `openrlhf:FILE`.
Each module has one class, with the same interface as a user's own environment. Each instance runs one episode
and returns the library's answers as turns.
"""
