"""Memory of a rank: how much models take, which of their parts lie in it when, and who moves them.

Here: sizes from a folder's headers, footprints of bound roles, the schedule of moves that fits, and the manager that carries it out.
Not here: the pass that puts the schedule into a plan (`rlflow.passes.residency`), moving tensors (each backend's own).
"""
