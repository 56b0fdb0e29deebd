"""Adapters for environments of other libraries.

Their names are `textarena:ID`, `skyrl_gym:ID`, `openenv:URL` and `openrlhf:FILE`, given with `--env`. Each
module has one class, which holds an episode of a library and returns its answers as turns. The adapters use
nothing that a user's own environment could not use.
"""
