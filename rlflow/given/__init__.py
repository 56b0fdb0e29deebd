"""What is given for a run, and what is made of it for each role.

Here: flags, TOML and keywords sorted into options; roles bound once to folders, backends and settings; data, rewards.
Not here: the flow's own settings (`rlflow.author.settings`), starting anything (`rlflow.runs`), the words of commands (`rlflow.cli`).
"""
