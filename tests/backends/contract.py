"""The promises of ``rlflow/training/protocols.py`` as claims about every backend, and the rank of a pool that
checks them.

contract.py BACKENDS RANK RANKS MEETING MODELS OUT

checks every claim on this rank, for one backend or several (A,B). It writes to OUT, by backend and claim, the
failure or "". A file ``own_BACKEND.py`` may add CHECKS of one backend, by number of ranks.
"""

import gc
import importlib
import json
import os
import sys
import traceback
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlflow.config.roles.backends import backend
from rlflow.config.roles.bound import usual
from rlflow.errors import PlanError
from rlflow.training.peers import Peers
from rlflow.training.protocols import ModelSpec

HERE = Path(__file__).parent
MODULES = {"Trainer": "training_claims", "Generator": "sampling_claims"}
SHAPES = ("qwen3", "llama", "gpt2", "gemma3")
# For an engine shared by ranks. tests/training/weight_sync/test_engines.py compares the weights of every
# shape on its ranks bit for bit.
SHARED_SHAPES = ("gpt2", "gemma3")
HEADS = {"llama values": {"head": "values"}, "reward scores": {"head": "scores"}}
ADAPTERS = {"gpt2 lora=4": {"lora": 4, "lr": 1e-2}}
# Rows of real lengths, many of them longer than a micro-batch. Rows of other cases have a few tokens.
BUDGETS = {"micro_tokens": 700, "logit_tokens": 100}
LONG = {"gemma3 long": BUDGETS | {"gradient_checkpointing": True}, "llama long": BUDGETS}

# Settings with another layout of ranks than the default. The claims run again for these shapes.
LAYOUTS = {
    "fsdp": {"shard=none": ("llama",), "tensor_parallel=2": ("llama", "qwen3", "gemma3")},
    "deepspeed": {"zero=1": ("llama",), "zero=2": ("llama",)},
}
# Budgets that rows of real lengths exceed.
SAMPLES_WITH = {
    "local": {"batch_tokens": 5000},
    "vllm": {"kv_cache_memory_bytes": 16 << 20, "max_num_seqs": 32},
}

# Claims that some backends cannot meet. Every other claim holds for all.
NO_MODEL = {"null": "columns are functions of the row key, and nothing is learned"}
NO_PLAN = {
    "gpt2": "transformers has no tensor-parallel plan for GPT-2, so that the fsdp backend refuses it: "
    "'no plan in its config'"
}


class Unusable(Exception):
    """A package is missing."""


@dataclass(frozen=True)
class Ground:
    """The setting of the claims: the backend, this rank, and folders for models and files. All ranks have the
    same folders.
    """

    name: str
    rank: int
    ranks: int
    models: Path
    folder: Path
    alone: Any = None  # torch's group of only this rank

    @property
    def backend(self) -> Any:
        return backend(self.name)

    @property
    def modelless(self) -> bool:
        return self.name in NO_MODEL

    def made(self, half: str, spec: ModelSpec, **given: Any) -> Any:
        """Make a Trainer or Generator with those of the given settings that it has. Raise Unusable if its
        package is missing.
        """
        kind = getattr(self.backend, half)
        known = {field.name for field in fields(kind.Settings)}
        try:
            return kind(
                spec, kind.Settings(**{name: value for name, value in given.items() if name in known})
            )
        except PlanError as error:
            if error.problems[0].code == "missing-package":
                raise Unusable(error.problems[0].message) from error
            raise

    def peers(self) -> Peers:
        """Return the peers of a trainer that treats this rank as the only one."""
        return Peers(self.alone)

    def together(self, own: Any) -> list[Any]:
        """Return the value of each rank."""
        found = [own] * self.ranks
        if self.ranks > 1:
            dist.all_gather_object(found, own)
        return found

    def first(self, own: Any) -> Any:
        """Return the first rank's value on all ranks."""
        found = [own]
        if self.ranks > 1:
            dist.broadcast_object_list(found, 0)
        return found[0]


def shares_engines(name: str) -> bool:
    """Return whether several ranks can share one generator."""
    return "tensor_parallel" in backend(name).Generator.Settings.__dataclass_fields__


def cases(name: str, half: str, ranks: int) -> dict[str, dict[str, Any]]:
    """Return the cases of a side: names, which start with a shape, and settings."""
    if half == "Generator":
        # its ranks do not communicate
        alone = name in NO_MODEL or (ranks > 1 and not shares_engines(name))
        return dict.fromkeys(
            SHAPES[:1] if alone else SHAPES if ranks == 1 else SHARED_SHAPES, SAMPLES_WITH.get(name, {})
        )
    if name in NO_MODEL:
        return {SHAPES[0]: {}}
    found: dict[str, dict[str, Any]] = {
        shape: {"gradient_checkpointing": shape == "gemma3"} for shape in SHAPES
    }
    found |= LONG if ranks == 1 else dict([*LONG.items()][:1])
    if divides(name) == (ranks > 1):
        found |= HEADS | ADAPTERS
    for layout, shapes in LAYOUTS.get(name, {}).items() if ranks > 1 else ():
        setting, _, value = layout.partition("=")
        found |= {
            f"{shape} {layout}": {setting: int(value) if value.isdigit() else value} for shape in shapes
        }
    return found


def divides(name: str) -> bool:
    """Return whether each rank holds a part of the weights."""
    return usual(name, "trainer").collective


def claims(name: str, half: str, case: str, ranks: int) -> dict[str, Any]:
    """Return the claims of a case by name, in order: all, or only those that may depend on the layout of
    ranks.
    """
    module = importlib.import_module(MODULES[half])
    chosen = tuple(module.CLAIMS)
    if half == "Trainer" and case in LONG:
        chosen = module.OF_LONG_ROWS
    if half == "Trainer" and ranks > 1:
        chosen = module.OF_LAYOUTS if "=" in case and case not in ADAPTERS else chosen
        chosen = chosen if divides(name) else module.OF_RANKS
    return {claim: module.CLAIMS[claim] for claim in chosen}


def named(name: str, ranks: int) -> list[str]:
    """Return every claim about a backend: side, case and claim."""
    sides = [half for half in ("Trainer", "Generator") if hasattr(backend(name), half)]
    return [
        f"{half}: {case}: {claim}"
        for half in sides
        for case in cases(name, half, ranks)
        for claim in claims(name, half, case, ranks)
    ]


def checked(ground: Ground, half: str, case: str) -> dict[str, str]:
    """Return the failure of each claim of a case. The first failure ends the case, because ranks no longer
    run in step.
    """
    module = importlib.import_module(MODULES[half])
    found: dict[str, str] = {}
    subject = None
    for claim, holds in claims(ground.name, half, case, ground.ranks).items():
        try:
            subject = subject or module.Subject(ground, case, **cases(ground.name, half, ground.ranks)[case])
            holds(subject)
            found[f"{half}: {case}: {claim}"] = ""
        except Unusable:
            raise
        except Exception:
            found[f"{half}: {case}: {claim}"] = traceback.format_exc()
            break
    return found


def everything(ground: Ground, own: dict[str, Any], contract: bool) -> dict[str, str]:
    """Return the failure of each claim of the contract, if requested, and of each check of the backend's own."""
    found: dict[str, str] = {}
    for half in ("Trainer", "Generator") if contract else ():
        for case in cases(ground.name, half, ground.ranks) if hasattr(ground.backend, half) else ():
            found |= checked(ground, half, case)
            if any(found.values()):
                return found
    for name, check in own.items():
        try:
            check(ground)
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
            return found
    return found


def joined(rank: int, ranks: int, meeting: Path) -> Any:
    """Join the group of all ranks; return the group of only this rank."""
    if ranks == 1:
        return None
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(meeting), ranks),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=240),
    )
    return [dist.new_group([rank]) for rank in range(ranks)][rank]


def checks(name: str, ranks: int) -> dict[str, Any]:
    """Return the checks of the backend's own."""
    module = f"own_{name}"
    return (
        dict(importlib.import_module(module).CHECKS.get(ranks, {}))
        if (HERE / f"{module}.py").exists()
        else {}
    )


def main(
    names: str, rank: int, ranks: int, meeting: Path, models: Path, out: Path, asked: str = "contract,own"
) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    alone, found = joined(rank, ranks, meeting), {}
    gc.freeze()  # some engines collect garbage for each trainer, over all imported modules
    for name in names.split(","):
        ground = Ground(name, rank, ranks, models, meeting.parent, alone)
        try:
            found[name] = everything(
                ground, checks(name, ranks) if "own" in asked else {}, "contract" in asked
            )
        except Unusable as error:
            found[name] = {"unusable": str(error)}
    out.write_text(json.dumps(found))
    if ranks > 1:
        dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *map(Path, sys.argv[4:7]))
