"""A user's configuration of a run: flags, TOML files and keywords as one flat mapping of names to values.

The package sorts the values into settings of the flow, options of the run and settings of roles, and suggests
the nearest name for an unknown one. The flow's settings are in `rlflow.author.settings`, the roles made from
them in `rlflow.config.roles`, the texts of commands in `rlflow.cli`.
"""
