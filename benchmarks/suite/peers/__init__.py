"""Other systems as cells of a comparison, one file with a class ``System`` for each.

`rlflow.benchmarks.child` runs them and defines the protocol. A system with requirements runs in its own
interpreter. Only ``by_hand``, ``chain`` and ``dispatch`` import rlflow, because they measure parts of rlflow.
"""
