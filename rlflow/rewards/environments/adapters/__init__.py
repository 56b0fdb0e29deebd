"""Environments of other libraries, named by the library and what it calls them: `--env textarena:ID`,
`skyrl_gym:ID`, `openenv:URL`, `openrlhf:FILE`.

Here: one class a module, which holds an episode of a library and gives its answers as turns.
Not here: the libraries themselves, or anything that a user's own environment could not do.
"""
