"""What a user says of a run: the run's own options, flags, TOML and keywords as one flat mapping, and names
of backends' settings.

Here: sorting what is given into the flow's settings, the run's options and settings of roles, with the
nearest name for what is unknown. Not here: the flow's settings (`rlflow.author.settings`), what a role
becomes of it (`rlflow.config.roles`), texts of commands (`rlflow.cli`).
"""
