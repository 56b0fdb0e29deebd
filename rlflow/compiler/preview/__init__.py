"""Everything that a plan can show before a run: placement, order, data movement, memory and problems.

These are pure functions of a plan and of the headers in model folders, and load no models.
`rlflow.compiler.passes` makes the plan, `rlflow.compiler.simulate` times it, and `rlflow.cli.plan` prints it.
"""
