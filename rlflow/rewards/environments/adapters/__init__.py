"""Adapters for environments of other libraries.

Users name these environments with `--env`: `textarena:ID`, `skyrl_gym:ID`, `openenv:URL` and `openrlhf:FILE`.
Each module has one class. An instance of the class runs one episode of the library and returns the library's
answers as turns. The adapters use the same interface as a user's own environment.
"""
