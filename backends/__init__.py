"""The shipped backends. Each is a module or package with a ``Trainer``, a ``Generator`` or both, and is
selected by its name.

`local` is the reference. `fsdp` and `deepspeed` have trainers, `vllm` has a generator. `null` has no model:
it computes numbers from row keys, and its calls take as long as its settings say. `rlflow.training.protocols`
defines the protocols. `rlflow.config.roles.backends` loads the backend of a role.
"""
