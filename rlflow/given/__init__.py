"""What is given for a run, and what is made of it for each role.

Here: flags, TOML and keywords sorted into options; backends and their settings by role; the data set and the rewards that are named.
Not here: the flow's own settings (`rlflow.author.settings`), starting anything (`rlflow.runs`), the words of commands (`rlflow.cli`).
"""
