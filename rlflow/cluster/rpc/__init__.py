"""How the driver and the workers of a run talk: actors in pools, sockets beside Ray, messages, and batches as
bytes.

Here: pools of Ray actors and calls to them with deadlines; short calls over sockets; what a request and an
answer are made of. Not here: which rows go to which rank (`rlflow.cluster.sharding`), what an operation does
(`rlflow.cluster.worker`).
"""
