"""What a plan says before anything is started: who runs where and when, what moves, what lies in memory, what
does not fit.

Here: pure functions of a plan and of what folders' headers say. No model is loaded. Not here: making the plan
(`rlflow.compiler.passes`), timing it (`rlflow.compiler.simulate`), printing it (`rlflow.cli.plan`).
"""
