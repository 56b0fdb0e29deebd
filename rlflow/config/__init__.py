"""A user's configuration of a run: flags, TOML files and keywords, as one flat mapping of names to values.

The package sorts these values into settings of the flow, options of the run and settings of roles. For an
unknown name, it suggests the nearest known name. The flow's settings are defined in `rlflow.author.settings`.
`rlflow.config.roles` makes roles from the configuration. The commands and their help are in `rlflow.cli`.
"""
