"""The fsdp trainer: the local trainer, with weights, gradients and optimizer state split across a pool's
ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from rlflow.author import torch_private
from rlflow.author.batch import Batch
from rlflow.backends import local
from rlflow.backends.fsdp.files import Files
from rlflow.backends.fsdp.network import load_sharded
from rlflow.backends.fsdp.ranks import Ranks, copies, own
from rlflow.backends.fsdp.settings import TrainerSettings
from rlflow.backends.local.network import Network
from rlflow.backends.local.read_model import value_head
from rlflow.errors import PlanError
from rlflow.training.peers import Peers
from rlflow.training.protocols import Capabilities, ModelSpec


class Trainer(local.Trainer):
    """A trainer whose model is split across all ranks of torch's default group. Without a group, it behaves
    like the local trainer."""

    Settings = TrainerSettings

    def __init__(self, spec: ModelSpec, settings: TrainerSettings | None = None) -> None:
        self.ranks = _ranks(spec, settings or TrainerSettings())
        super().__init__(spec, settings or TrainerSettings())
        if self.ranks is not None:
            self.peers = Peers(self.ranks.data.get_group(), lockstep=True)

    @classmethod
    def capabilities(cls, settings: TrainerSettings, device: str) -> Capabilities:
        """Return the local trainer's capabilities, adjusted for ranks that share one model."""
        full = settings.shard == "full"
        divided = ("weights", "adapters", "gradient", "optimizer") if full else ()
        return replace(
            super().capabilities(settings, device),
            tensor=settings.tensor_parallel,
            collective=True,
            live=False,
            divided=divided,
        )

    def _network(self) -> Network:
        return (
            load_sharded(self.spec, self.settings, self.ranks)
            if self.ranks is not None
            else super()._network()
        )

    def forward_ahead(self, batch: Batch, want: tuple[str, ...] | None = None) -> Batch:
        """Run ``forward``. A sharded model keeps no graph, because its layers are freed between passes."""
        return self.forward(batch, want) if self.ranks is not None else super().forward_ahead(batch, want)

    def shards(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the model's weights without adapters as (Hugging Face name, DTensor or complete tensor)
        pairs.

        The tensors are live, and nothing is gathered. A tied weight is yielded only once.
        """
        return ((names[0], tensor) for names, tensor in self.network.own())

    def save(self, folder: Path) -> None:
        """Write the model folder. Every rank must call this, but only the first one writes."""
        if not dist.is_initialized() or dist.get_rank() == 0:
            super().save(folder)
        elif self.ranks is not None:
            self.network.save(folder)
            self._save_adapter(folder)

    @property
    def first(self) -> bool:
        """True on the rank that writes files."""
        return not dist.is_initialized() or dist.get_rank() == 0

    def load(self, folder: Path) -> None:
        """Load weights from a folder written by ``save``. The optimizer stays as it is."""
        if self.ranks is None:
            return super().load(folder)
        files = Files(folder, self.network.module.base_model_prefix)
        try:
            self.network.copy(files.whole(self.network.own()))
        except KeyError:
            return super().load(folder)
        self.base = None
        for name, value in (
            value_head(self.network.module, folder).state_dict().items() if self.spec.head == "values" else ()
        ):
            self.network.put(self.network.head.state_dict()[name], value)

    def state(self) -> dict[str, Tensor]:
        """Return the local trainer's ``state`` on the first rank, as complete tensors in host memory, and {}
        on all others. Every rank must call this."""
        return self.network.host(self._state()) if self.ranks is not None else super().state()

    def _compute(self, rows: Batch, want: tuple[str, ...]) -> dict[str, Tensor]:
        if self.ranks is None:
            return super()._compute(rows, want)
        return self.network.root(self._computed, rows, want)

    def _computed(self, rows: Batch, want: tuple[str, ...]) -> dict[str, Tensor]:
        """Return copies of the computed quantities, because FSDP2 attaches hooks to the results and a view
        could lose its hook."""
        return {name: x.clone() for name, x in super()._compute(rows, want).items()}

    def _tensors(self, part: str) -> Iterator[Tensor]:
        return (own(tensor.detach()) for tensor in super()._tensors(part))

    def _clip(self, learning: list[torch.nn.Parameter]) -> float:
        """Clip the gradients and return their norm before clipping.

        The backward passes have already summed the gradients over the ranks. Where several ranks hold the
        same part of a gradient, the norm counts it once.
        """
        if self.ranks is None:
            return super()._clip(learning)
        self._add_heads()
        square = torch.zeros((), dtype=torch.float64, device=self.device)
        gradients = [own(p.grad) for p in learning if p.grad is not None]
        for parameter in learning:
            if parameter.grad is not None:
                square += torch.linalg.vector_norm(own(parameter.grad)).double().square() / copies(parameter)
        dist.all_reduce(square)
        norm = float(square.sqrt())
        torch_private.multiply_all(gradients, min(1.0, self.settings.max_grad_norm / (norm + 1e-6)))
        return norm

    def _learning(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, own(tensor)) for name, tensor in super()._learning())

    def _add_heads(self) -> None:
        """Sum the gradients of the parameters in ``added`` over the tensor-parallel ranks. Each rank has only
        the gradient from its own attention heads."""
        named = dict(self.network.module.named_parameters())
        for parameter in (named[name] for name in self.network.added):
            if parameter.grad is not None:
                dist.all_reduce(own(parameter.grad), group=self.ranks.tensor.get_group())


def _ranks(spec: ModelSpec, settings: TrainerSettings) -> Ranks | None:
    """Return the mesh of ranks, or None if every rank holds the complete model. Raises PlanError if
    ``tensor_parallel`` needs a mesh and there is none."""
    alone = not dist.is_initialized()
    if settings.tensor_parallel > 1 and (alone or settings.shard == "none"):
        setting = "one process without a torch group" if alone else "--shard none"
        raise PlanError.of(
            "tensor-parallel",
            "tensor_parallel needs a pool of ranks that share a model",
            found=setting,
            expected="--pools all=N with as many ranks, and --shard full",
            remedy="--tensor-parallel 1",
        )
    return None if alone or settings.shard == "none" else Ranks.of(spec.device, settings.tensor_parallel)
