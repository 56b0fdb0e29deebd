"""Backends, found by name: each is a module or package here with a ``Trainer``, a ``Generator`` or both.

`local` is the reference. `fsdp` and `deepspeed` train, `vllm` samples. `null` has no model: its numbers are
functions of row keys, and its calls take the times that its settings declare. The protocols are in
`rlflow.training.protocols`. `rlflow.config.roles.backends` chooses and loads a backend for a role.
"""
