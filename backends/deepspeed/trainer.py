"""The DeepSpeed trainer: the local trainer, with weights, gradients and optimizer state split by ZeRO."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
from annotated_types import Ge, Le
from torch import Tensor, nn

from rlflow.author.batch import Batch
from rlflow.author.loss import Quantity
from rlflow.backends import local
from rlflow.backends.deepspeed import moving
from rlflow.backends.deepspeed.partitions import (
    MOMENTS,
    Parts,
    flats,
    link_moments,
    moment,
    part,
    put,
    put_learning,
    put_moment,
    shape,
    whole,
)
from rlflow.backends.deepspeed.start import engine, quiet, start
from rlflow.backends.local import lora
from rlflow.backends.local.heap import HEAP
from rlflow.backends.local.network import load_network
from rlflow.backends.local.sequences import Sequences
from rlflow.backends.local.settings import TrainerSettings as LocalSettings
from rlflow.backends.local.settings import refuse_compile
from rlflow.backends.local.tokenizer import copy_tokenizer
from rlflow.backends.local.trainer import stored
from rlflow.checkpoints.export import VALUE_HEAD
from rlflow.errors import listed
from rlflow.training.learning import OptimizerStep
from rlflow.training.peers import Peers
from rlflow.training.protocols import Capabilities, ModelSpec
from rlflow.training.weight_sync.shards import TensorViews, pieces_of


@dataclass(frozen=True)
class TrainerSettings(LocalSettings):
    """The local trainer's options, plus the ZeRO stage."""

    # divided among ranks: 1 optimizer state, 2 also gradients, 3 also weights; more saves memory
    zero: Annotated[int, Ge(1), Le(3)] = 3

    def __post_init__(self) -> None:
        """Raise PlanError if an option of the local trainer isn't supported here."""
        refuse_compile(self, "deepspeed")


class Computation(nn.Module):
    """Runs the local trainer's computation as a module, so that DeepSpeed gathers weights around its
    submodules."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        self.module = trainer.network.module
        if trainer.spec.head == "values":
            self.head = trainer.network.head
        self.reader = trainer.reader
        self.compute = trainer.compute_whole

    def forward(self, *, rows: Batch, want: tuple[str, ...]) -> dict[str, Tensor]:
        """Return the columns in ``want`` for these rows. Arguments are keyword-only because DeepSpeed
        searches positional arguments for tensors."""
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # the cache would keep all weights in bfloat16 during a pass
        try:
            return self.compute(rows, want)
        finally:
            torch.set_autocast_cache_enabled(cached)


class Reader(nn.Module):
    """Wraps every use of the language-model head in a single module call.

    The number of times the head is used may differ between ranks, but DeepSpeed must see the same calls on
    every rank. With this module, the head's weight is gathered once for the whole call.
    """

    def forward(self, hidden: Tensor, *, read: Callable[[Tensor], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return ``read(hidden)``, computed while the head's weight is gathered."""
        return read(hidden)


class Trainer(local.Trainer):
    """One rank of a trainer whose model is split across several ranks.

    Each rank first reads the complete folder into host memory. Most calls gather weights, so all ranks must
    make the same calls in the same order.
    """

    Settings = TrainerSettings
    settings: TrainerSettings

    def __init__(self, spec: ModelSpec, settings: TrainerSettings | None = None) -> None:
        super().__init__(replace(spec, device="cpu"), settings or TrainerSettings())
        # after loading, so that no process group remains if the folder is refused
        package = start(spec.device)
        self.spec, self.peers = spec, Peers(lockstep=True)
        self.packs = self.packs and spec.device == "cpu"
        # for a frozen model, only its value head, which `network.module` does not contain
        self.own = self.network.parameters()
        self.learning = self.own if spec.trained else {}
        self.reader = Reader()
        self.engine: Any = None  # None for a frozen model whose weights are not divided
        if spec.trained or self.settings.zero == 3:
            self.engine = engine(
                package, Computation(self).eval(), self.optimizer, self.settings.zero, self.settings
            )
        if self.settings.zero == 3 and spec.head == "logprobs":
            self._read_as_one(package)
        moving.move_rest(self.network, torch.device(spec.device))

    def _read_as_one(self, package: Any) -> None:
        head = self.network.module.get_output_embeddings()
        self.network.read = head.forward  # without its hooks
        for parameter in head.parameters():
            package.zero.register_external_parameter(self.reader, parameter)

    @property
    def device(self) -> torch.device:
        """The device on which this rank runs its model."""
        return torch.device(self.spec.device)

    @classmethod
    def capabilities(cls, settings: TrainerSettings, device: str) -> Capabilities:
        """Return the local trainer's capabilities, adjusted for ranks that share one model.

        ZeRO stage 1 splits the optimizer state, stage 2 also the gradients, and stage 3 also the weights.
        Stage 3 keeps a gradient buffer; under the other stages, gradients are in memory only during an
        update.
        """
        divided = (
            ("optimizer",),
            ("gradient", "optimizer"),
            ("weights", "adapters", "gradient", "optimizer"),
        )[settings.zero - 1]
        return replace(
            super().capabilities(settings, device),
            collective=True,
            live=False,
            divided=divided,
            copied=True,
            movable=("weights", "optimizer", "gradient") if settings.zero == 3 else ("weights", "optimizer"),
            float64=False,  # its optimizers keep weights in float32
            flat=True,  # stage 3 divides flattened tensors
        )

    # -- computing
    # --------------------------------------------------------------------------------------------------------

    def forward(self, batch: Batch, want: tuple[str, ...] | None = None, *, ahead: bool = False) -> Batch:
        """Run the local trainer's ``forward``. Afterwards, this rank keeps only its own part of the
        weights."""
        out = super().forward(batch, want)
        if self.settings.zero == 3:
            # drop weights that DeepSpeed prefetched for a backward pass
            self.engine.optimizer.empty_partition_cache()
        return out

    def forward_ahead(self, batch: Batch, want: tuple[str, ...] | None = None) -> Batch:
        """Run ``forward`` without keeping a graph. A rank that reused a kept pass would run fewer passes than
        the other ranks."""
        return self.forward(batch, want)

    def backward(self, objective: Tensor) -> None:
        """Backpropagate a scalar objective, summed over this rank's rows, and add its gradient to that of the
        current step."""
        # DeepSpeed takes the mean over ranks; a step needs the sum
        self.engine.backward(objective * self.peers.ranks, scale_wrt_gas=False)

    def step(self) -> OptimizerStep:
        """Clip the gradient, take an optimizer step, and clear the gradient. If the gradient isn't finite,
        the weights stay as they are."""
        lr = self.schedule.rate(self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        with quiet():  # rlflow itself reports a dropped step
            self.engine.step()
        if self.settings.zero == 3:
            # otherwise, a layer that no token reaches would keep the gradient of an earlier step
            self.engine.optimizer.grad_partitions_flat_buffer.zero_()
        HEAP.step_ended()
        applied = bool(self.engine.was_step_applied())
        self.steps += applied
        return OptimizerStep(applied, float(self.engine.get_global_grad_norm()), lr)

    def compute_whole(self, rows: Batch, want: tuple[str, ...]) -> dict[str, Tensor]:
        """Compute the quantities in ``want``: per-token quantities as a flat tensor [entries], scores as
        [rows].

        Each layer's weights are gathered just before it runs.
        """
        return super()._compute(rows, want)

    def _compute(self, rows: Batch, want: tuple[Quantity, ...]) -> dict[str, Tensor]:
        return (
            self.engine(rows=rows, want=want) if self.engine is not None else self.compute_whole(rows, want)
        )

    def _logprobs(
        self, rows: Batch, layout: Sequences, hidden: Tensor, entropy: bool, want: tuple[str, ...]
    ) -> dict[str, Tensor]:
        all_pieces = super()._logprobs
        return self.reader(hidden, read=lambda hidden: all_pieces(rows, layout, hidden, entropy, want))

    def _learning(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, part(parameter)[0]) for name, parameter in self.learning.items())

    # -- weights
    # --------------------------------------------------------------------------------------------------------

    def _own(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, parameter or buffer) pairs without adapters. A tied tensor is yielded
        only once."""
        self.network.check_awake()
        storages = set()
        for name, tensor in self.network.module.state_dict(keep_vars=True).items():
            if id(tensor) not in storages and not lora.is_adapter(name):
                storages.add(id(tensor))
                yield lora.plain(name), tensor

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the model's weights as (Hugging Face name, complete tensor) pairs, gathering one at a time.

        A tied weight is yielded only once. Every rank must iterate to the end.
        """
        return self._weights()

    def _weights(self, precise: bool = False) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._own():
            layer = self.network.adapted.get(name.removesuffix(".weight"))
            yield name, whole(tensor) if layer is None else lora.merged(layer, whole(tensor), whole, precise)

    def _merging(self) -> Iterator[tuple[Any, Tensor]]:
        for name, tensor in self._own():
            if (layer := self.network.adapted.get(name.removesuffix(".weight"))) is not None:
                yield layer, whole(tensor)

    def _whole(self, tensor: Tensor) -> Tensor:
        return whole(tensor)

    @property
    def first(self) -> bool:
        """True on the rank that writes files."""
        return dist.get_rank() == 0

    def pieces(self) -> dict[str, TensorViews] | None:
        """Return views of this rank's parts of ``weights``, by tensor name, without gathering anything.

        Returns None if there are adapters, because ``weights`` then merges them into new tensors.
        """
        return None if self.network.adapted else pieces_of(self._own())

    def masters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's live weights, including a value head. Layers with adapters are merged."""
        for name, tensor in self._own():
            layer = self.network.adapted.get(name.removesuffix(".weight"))
            yield (
                name,
                tensor if layer is None else lora.merged(layer, whole(tensor), whole, precise=True),
            )
        for name, parameter in self.network.head.named_parameters() if self.spec.head == "values" else ():
            yield f"{VALUE_HEAD}{name}", parameter

    def _take(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy ``tensors`` into the weights of the same names. Raises ValueError if a name is unknown, a
        shape differs, or a weight is missing."""
        own = {
            lora.plain(name): tensor
            for name, tensor in self.network.module.state_dict(keep_vars=True).items()
        }
        missing = {id(tensor): name for name, tensor in self._own()}
        for name, value in tensors:
            if name not in own or shape(own[name]) != value.shape:
                raise ValueError(
                    f"weights: found '{name}' {list(value.shape)}, expected one of "
                    f"{listed([f'{known} {list(shape(tensor))}' for known, tensor in own.items()], 8)}"
                )
            self._change(own[name], value)
            missing.pop(id(own[name]), None)
        if missing:
            raise ValueError(
                f"weights: found no {listed(missing.values(), 8)}, expected every weight of the model"
            )

    def _change(self, tensor: Tensor, value: Tensor) -> None:
        learns = any(tensor is parameter for parameter in self.learning.values())
        (put_learning if learns else put)(tensor, value)

    # -- files and state
    # --------------------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Write a Hugging Face folder with the same files as the local trainer's. Every rank must call this,
        but only the first one writes."""
        first = dist.get_rank() == 0
        weights = {name: tensor.cpu() for name, tensor in self._weights(precise=True) if first}
        head = (
            {name: whole(p).cpu() for name, p in self.network.head.named_parameters()}
            if self.spec.head == "values"
            else {}
        )
        if first:
            folder.mkdir(parents=True, exist_ok=True)
            self.network.write(folder, weights, head)
            copy_tokenizer(self.spec.folder, folder)
        self._save_adapter(folder)
        dist.barrier()

    def load(self, folder: Path) -> None:
        """Load weights from a folder written by ``save``. The optimizer stays as it is."""
        other = load_network(ModelSpec(folder, self.spec.head, self.spec.trained, "cpu", self.spec.dtype))
        self._take(other.tensors())
        self.base = None
        for name, parameter in self.learning.items():
            if ".lora_B." in name:
                put_learning(parameter, torch.zeros(shape(parameter)))
        if self.spec.head == "values":
            for name, parameter in self.network.head.named_parameters():
                self._change(parameter, other.head.state_dict()[name])

    def state(self) -> dict[str, Tensor]:
        """Return the local trainer's ``state`` in host memory on the first rank, and {} on all others.

        Names and shapes don't depend on the ZeRO stage or the number of ranks. Every rank must call this.
        """
        first = dist.get_rank() == 0
        return {name: tensor.cpu() for name, tensor in self._state() if first}

    def _state(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._weights(precise=True):
            yield f"parameters/{name}", tensor
        yield from self._counts()
        if self.network.adapted:
            yield "base/sha256", self._base_digest()
        self._check_optimizer()
        if self.learning:
            link_moments(self.engine.optimizer)
        for name, parameter in self.own.items():
            if name.startswith(VALUE_HEAD) or lora.is_adapter(name):
                yield stored(name), whole(parameter)
            for kind in MOMENTS if self.learning and self.optimizer.state else ():
                yield f"{kind}/{name}", moment(parameter, kind)

    def restore(self, state: dict[str, Tensor]) -> None:
        """Restore a state returned by ``state``. Every rank must be given the complete state.

        The state may come from another ZeRO stage, another number of ranks, or the local trainer. Raises
        PlanError if its adapters, or the base weights they belong to, differ from this model's.
        """
        if self.network.adapted:
            self._check_adapters(state)
        else:
            own = (
                (name.removeprefix("parameters/"), t)
                for name, t in state.items()
                if name.startswith("parameters/")
            )
            self._take((name, t) for name, t in own if not name.startswith(VALUE_HEAD))
        taken = self._restore_counts(state)
        for name, parameter in self.own.items():
            if self.network.adapted or name.startswith(VALUE_HEAD):
                self._change(parameter, state[stored(name)])
        if self.learning:
            self._restore_moments(state, taken)

    def _clear_moments(self) -> None:
        self._restore_moments({}, 0.0)

    def _restore_moments(self, state: dict[str, Tensor], taken: float) -> None:
        self.optimizer.state.clear()
        known = any(f"exp_avg/{name}" in state for name in self.learning)
        for flat in flats(self.engine.optimizer) if known else ():
            step = torch.tensor(taken, device=flat.device if self.device.type == "cuda" else "cpu")
            self.optimizer.state[flat] = {
                kind: torch.zeros_like(flat, requires_grad=False) for kind in MOMENTS
            } | {"step": step}
        link_moments(self.engine.optimizer)
        for name, parameter in self.learning.items() if known else ():
            for kind in MOMENTS:
                if f"{kind}/{name}" in state:
                    put_moment(parameter, kind, state[f"{kind}/{name}"])

    def _base_digest(self) -> Tensor:
        if self.base is None:
            self.base = lora.digest(Parts(self.network.module), lambda tensor: tensor)
        return self.base

    def _shape(self, parameter: Tensor) -> list[int]:
        return list(shape(parameter))

    # -- residency
    # --------------------------------------------------------------------------------------------------------

    def _tensors(self, part: str) -> Iterator[Tensor]:
        optimizer = self.engine.optimizer if self.engine is not None else None
        if part == "weights" and hasattr(optimizer, "empty_partition_cache"):
            optimizer.empty_partition_cache()
        return moving.held(part, self.network, optimizer if self.learning else None)
