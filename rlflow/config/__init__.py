"""Turn what a user writes (flags, TOML files, keywords) into the configuration of a run.

All three sources end up as one flat mapping of names to values, which is then sorted into flow settings, run
options and role settings. An unknown name gets a suggestion. The flow's settings are defined in
`rlflow.author.settings`, roles are built in `rlflow.config.roles`, and the commands and their help are in
`rlflow.cli`.
"""
