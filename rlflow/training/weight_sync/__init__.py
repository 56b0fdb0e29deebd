"""Move weights from the trainers' layout to the generators' layout, following a plan made before any weights
move.

The package has layouts, plans, transports, proofs and digests. It works in a single process or between the
ranks of a torch group. `rlflow.cluster.weights.sharded_models` and `rlflow.execution.local_engine` decide
when weights move, and between which pools.

    source, target = join(held), join(needed)   # from the TensorShards of every rank, by tensor name
    plan = make_plan(source, target, node_of, bucket)   # pure: the same on every rank
    resharder = Resharder(plan, rank, pieces, views, transport)   # bound once to this rank's live memory
    resharder.run(version)   # after every update
    resharder.close()

For every engine, names and coordinates are those of the Hugging Face checkpoint.

    boxes       elements of a tensor as half-open ranges per dimension
    layout      which rank holds which boxes of which tensor; ``kinds``: layouts computed from shapes
    planner     chooses one sender for every missing byte, in bounded buckets; ``transfer_plan``: the result
    shards      views of the parts of live tensors: plain tensors, DTensors, ZeRO-3 partitions
    trace       where an engine's ``load_weights`` puts each tensor; ``proof``: compares with a full reload
    transport   all-to-all over a torch group; ``segment``, ``mailbox``: shared memory; ``handles``: GPU memory
    execute     runs a plan on one rank
    verify      digests that do not depend on the layout

``boxes``, ``layout``, ``kinds``, ``planner`` and ``transfer_plan`` don't import torch. To add a transport,
implement ``transport.Transport``, or carry messages from ``Resharder.pack`` to ``Resharder.unpack`` yourself.
"""
