"""The list of sections, in the order in which they run. The most important sections come first."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gpu.check import Check

if TYPE_CHECKING:
    from gpu.ground import Ground


@dataclass(frozen=True)
class Section:
    """One section of checks.

    ``module``: the module of this package that makes the checks. ``given``: keyword arguments for its
    ``checks``. ``seconds``: deadline. ``needs``: packages in addition to the core's dependencies. ``quick``:
    whether the section is quick on a CPU with small models. Other sections run there only if the user names
    them.
    """

    name: str
    group: str
    what: str
    module: str
    seconds: float = 100.0
    needs: tuple[str, ...] = ()
    quick: bool = True
    given: Mapping[str, Any] = field(default_factory=dict)

    def missing(self) -> list[str]:
        """Return the packages that the section needs but are not installed."""
        return [package for package in self.needs if importlib.util.find_spec(package) is None]

    def checks(self, ground: Ground) -> Iterator[Check]:
        """Yield the section's checks."""
        found: Iterator[Check] = importlib.import_module(f"gpu.{self.module}").checks(ground, **self.given)
        return found


SECTIONS = (
    Section("same", "right", "log-probs, gradients, draws and an iteration: CPU against device", "same"),
    Section(
        "ppo",
        "right",
        "PPO learns the packaged task, in float32 and bfloat16",
        "learns",
        115.0,
        given={"algorithm": "ppo"},
    ),
    Section(
        "grpo",
        "right",
        "GRPO learns the packaged task, in float32 and bfloat16",
        "learns",
        115.0,
        given={"algorithm": "grpo"},
    ),
    Section("repeats", "right", "two equal runs give the same bits", "repeats"),
    Section("devices", "right", "checkpoints of one device continue on the other", "devices"),
    Section("variants", "right", "adapters, recomputed layers", "variants"),
    Section("waits", "fast", "how often the decode loop waits for the device", "waits", 60.0),
    Section(
        "qwen3-0.6b",
        "fast",
        "sampling, log-probs, update: compared with plain Hugging Face code",
        "speed",
        110.0,
        given={"shape": "0.6b"},
    ),
    Section(
        "qwen3-1.7b",
        "fast",
        "the same with a larger model",
        "speed",
        110.0,
        quick=False,
        given={"shape": "1.7b"},
    ),
    Section("micro", "memory", "micro_tokens and logit_tokens against measured peaks", "micro", 60.0),
    Section("sleep", "memory", "sleep and wake of trainer and generator", "sleep", 60.0),
    Section("limit", "memory", "--memory with roles that do not fit side by side", "limit", 60.0),
    Section("handles", "between", "two ranks on one device: shared handles, gloo, NCCL", "handles", 90.0),
    Section("fsdp", "between", "FSDP2 on one rank", "sharded", 60.0, given={"backend": "fsdp"}),
    Section(
        "zero",
        "between",
        "ZeRO on one rank",
        "sharded",
        60.0,
        ("deepspeed",),
        False,
        {"backend": "deepspeed"},
    ),
    Section(
        "vllm",
        "between",
        "vLLM: weights in place, mismatch, CUDA graphs, sleep levels",
        "vllm",
        115.0,
        ("vllm",),
        False,
    ),
    Section("pools", "between", "a run on pools of Ray workers", "pools", 100.0, ("ray",), False),
    Section(
        "trl", "fast", "an iteration of GRPO compared with TRL", "trl", 100.0, ("trl", "datasets"), False
    ),
)


def chosen(names: Sequence[str], quick: bool) -> list[Section]:
    """Return the sections with these names or in these groups; all sections if ``names`` is empty.

    ``quick``: if True, slow sections are returned only if they are named individually. Raises KeyError for an
    unknown name.
    """
    for name in names:
        if not any(name in (section.name, section.group) for section in SECTIONS):
            raise KeyError(name)
    if not names:
        return [section for section in SECTIONS if section.quick or not quick]
    return [
        section
        for section in SECTIONS
        if section.name in names or (section.group in names and (section.quick or not quick))
    ]
