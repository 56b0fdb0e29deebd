"""Moving weights from the layout in which they are trained to the one in which they sample, by a plan made
before anything moves.

Here: layouts, the plan, transports, proofs and digests, for one process or the ranks of a torch group. Not
here: pools and roles, and when a transfer is due (`rlflow.cluster.weights.sharded_models`,
`rlflow.execution.engine`).

    source, target = join(gathered), join(gathered)               # what every rank holds and needs:
    ``layout.Held`` by name plan = make_plan(source, target, node_of, bucket)             # pure, and the same
    on every rank resharder = Resharder(plan, rank, pieces, views, transport)   # bound once to this rank's
    live memory resharder.run(version)                                        # after every update
    resharder.close()

Names and coordinates are those of the Hugging Face checkpoint, whatever engine holds the bytes.

    boxes       which elements: half-open ranges per dimension
    layout      which rank holds which boxes of which tensor; the layouts that follow from shapes alone (``kinds``)
    planner     every missing byte from exactly one rank, in bounded buckets; ``plan`` is the result, with its statistics
    shards      pieces of live tensors: plain, DTensor, ZeRO-3
    trace       where an engine's own ``load_weights`` puts what it is given; ``proof`` compares with the engine's full reload
    transport   all-to-all over a torch group; ``segment`` shared memory of one machine; ``handles`` that of its GPUs
    execute     a plan at work on one rank
    digest      sums over elements that no layout changes

``boxes``, ``layout``, ``kinds``, ``planner`` and ``plan`` need no torch. A transport of another kind fulfils
``transport.Transport``, or moves what ``Resharder.pack`` gives to where ``Resharder.unpack`` takes it.
"""
