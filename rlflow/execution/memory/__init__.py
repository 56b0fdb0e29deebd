"""What a run keeps from one iteration to the next, beside weights and scalars.

Everything here is immutable: a write makes a new object, which takes the place of the old one when the iteration
has ended. So an iteration that fails, is skipped or is repeated changes nothing, and a copy costs nothing.
"""
