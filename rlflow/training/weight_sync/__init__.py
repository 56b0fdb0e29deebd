"""Move weights from the trainers' layout to the generators' layout, by a plan made before anything moves.

The package has layouts, plans, transports, proofs and digests, for one process or for the ranks of a torch
group. Pools, roles and the time of a transfer are elsewhere (`rlflow.cluster.weights.sharded_models`,
`rlflow.execution.local_engine`).

    source, target = join(held), join(needed)   # from the TensorShards of every rank, by tensor name
    plan = make_plan(source, target, node_of, bucket)   # pure: the same on every rank
    resharder = Resharder(plan, rank, pieces, views, transport)   # bound once to this rank's live memory
    resharder.run(version)   # after every update
    resharder.close()

Names and coordinates follow the Hugging Face checkpoint, for every engine.

    boxes       elements of a tensor as half-open ranges per dimension
    layout      which rank holds which boxes of which tensor; ``kinds``: layouts that follow from shapes
    planner     assigns every missing byte to one sender, in bounded buckets; ``transfer_plan``: the result
    shards      pieces of live tensors: plain, DTensor, ZeRO-3
    trace       where an engine's ``load_weights`` puts each tensor; ``proof``: compares with a full reload
    transport   all-to-all over a torch group; ``segment``, ``mailbox``: shared memory; ``handles``: of GPUs
    execute     runs a plan on one rank
    verify      digests of elements, the same in any layout

``boxes``, ``layout``, ``kinds``, ``planner`` and ``transfer_plan`` do not import torch. Another transport
implements ``transport.Transport``, or carries messages from ``Resharder.pack`` to ``Resharder.unpack``.
"""
