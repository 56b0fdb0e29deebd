"""Backends, found by name: each a module or package here with a ``Trainer``, a ``Generator`` or both.

Here: `local` (the reference), `fsdp` and `deepspeed` (train), `vllm` (samples), `null` (no model: functions
of row keys, declared times). Not here: the protocols that they fulfil (`rlflow.training.protocols`), choosing
and loading one for a role (`rlflow.config.roles.backends`).
"""
