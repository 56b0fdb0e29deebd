"""Everything that a plan shows before a run: placement, order, data movement, memory, and problems.

All functions are pure functions of a plan and of the headers in model folders. They load no model.
`rlflow.compiler.passes` makes the plan, `rlflow.compiler.simulate` times it, and `rlflow.cli.plan` prints it.
"""
