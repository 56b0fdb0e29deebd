"""Other systems as cells of a comparison, a file each with a class ``System``; each runs in an interpreter of
its own where it needs one.

Not here: the process that runs them and the protocol (`rlflow.benchmarks.child`). These files import nothing
of rlflow's, but for those that are about its parts: ``by_hand``, ``chain`` and ``dispatch``.
"""
