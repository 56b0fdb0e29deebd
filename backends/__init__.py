"""The backends that ship with rlflow. Each is a module or package, selected by name, that defines a
``Trainer``, a ``Generator`` or both.

`local` is the reference. `fsdp` and `deepspeed` provide trainers, `vllm` provides a generator. `null` has no
model: it computes numbers from row keys, and its calls take as long as its settings say. The protocols are in
`rlflow.training.protocols`, and `rlflow.config.roles.backends` loads a role's backend.
"""
