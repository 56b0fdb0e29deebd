"""A Hugging Face model whose weights lie in parts on the ranks of a pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers.modeling_layers import GradientCheckpointingLayer

from rlflow.backends.fsdp.folder import Files, load_empty
from rlflow.backends.fsdp.ranks import Ranks, box, own, whole
from rlflow.backends.fsdp.tensor_parallel import parallelize
from rlflow.backends.local import lora
from rlflow.backends.local.network import Network, computes_low, parts
from rlflow.backends.local.settings import TrainerSettings
from rlflow.training.protocols import Head, ModelSpec

T = TypeVar("T")


class Root(nn.Module):
    """Model and head in one module, since FSDP2 gathers what belongs to no layer around a module's forward: this one's is whatever
    is to be computed with the weights."""

    def __init__(self, module: nn.Module, head: nn.Module | None) -> None:
        super().__init__()
        self.module, self.head = module, head

    def forward(self, compute: Callable[..., T], *arguments: Any) -> T:
        """Call ``compute`` while the sharded weights are gathered around it."""
        return compute(*arguments)


class ShardedNetwork(Network):
    """A network whose forward runs within ``root``, and whose tensors all ranks read and write together, one after another. added: names
    of parameters whose gradients are added up over the tensor-parallel ranks."""

    def __init__(self, module: Any, kind: Head, head: nn.Linear | None, ranks: Ranks) -> None:
        super().__init__(module, kind, head)
        self.root, self.ranks = Root(module, head), ranks
        self.added: list[str] = []

    def whole(self, tensor: Tensor) -> Tensor:
        """Gather a parameter from all ranks. Every rank must call it."""
        return whole(tensor.detach())

    def put(self, target: Tensor, value: Tensor) -> None:
        """Write this rank's part of a whole tensor into a parameter."""
        own(target).copy_(value[box(target)])

    def identity(self, tensor: Tensor) -> Any:
        """A value that tied parameters share, to tell them from others."""
        return id(tensor)

    def held(self) -> Iterator[Tensor]:
        """The tensors of this rank: its own parts of parameters and buffers."""
        return (own(tensor) for tensor in super().held())

    def to(self, device: torch.device | str) -> None:
        """Move this rank's parts to a device."""
        self.root.to(device)

    def save(self, folder: Path) -> None:
        """Write the model folder on the first rank of the pool; the other ranks take part."""
        tensors = self.host(self.tensors(precise=True))
        head = self.host((name, self.whole(x)) for name, x in (self.head.state_dict().items() if self.kind == "values" else ()))
        if self.ranks.first:
            self.write(folder, tensors, head)

    def host(self, tensors: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Copies in host memory on the pool's first rank, nothing on the others."""
        copies = {}
        for name, tensor in tensors:
            if self.ranks.first:
                copies[name] = tensor.detach().to("cpu", copy=True)
            del tensor
        return copies

    def shard(self, low: bool) -> None:
        """Over the data-parallel ranks: layer by layer, the head in its own precision, the rest with the root. Gradients are sums, since
        the objective is already divided by what all ranks have."""
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if low else MixedPrecisionPolicy()
        for layer in self.backbone.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                fully_shard(layer, mesh=self.ranks.data, mp_policy=policy)
        if self.head is not None:
            fully_shard(self.head, mesh=self.ranks.data)
        fully_shard(self.root, mesh=self.ranks.data, mp_policy=policy, reshard_after_forward=True)
        for unit in self.root.modules():
            if isinstance(unit, FSDPModule):
                unit.set_gradient_divide_factor(1.0)
                unit.set_force_sum_reduction_for_comms(True)  # gloo has no other that takes a factor

    @torch.no_grad()
    def fill(self, spec: ModelSpec) -> None:
        """Storage for what has none, with the weights in the folder; what is not there is a new head's, and zero."""
        state = self.module.state_dict(keep_vars=True)
        empty = {lora.plain(name) for name, tensor in state.items() if tensor.is_meta}
        self.root._apply(lambda t: torch.empty_like(t, device=spec.device) if t.is_meta else t.to(spec.device))
        files = Files(Path(str(spec.folder)), self.module.base_model_prefix)
        for names, tensor in self.own():
            if names[0] in empty:
                files.read(names, tensor)
        for weight, value in lora.beginnings(self.module, spec.seed):
            self.put(weight, value)


def load_sharded(spec: ModelSpec, settings: TrainerSettings, ranks: Ranks) -> ShardedNetwork:
    """The local trainer's ``load_network`` for weights in parts: no rank ever has them all, unless ``load_empty`` has to."""
    module, head = parts(spec, settings, load_empty)
    network = ShardedNetwork(module, spec.head, head, ranks)
    network.hold_rotary(spec.longest)
    if ranks.tensor is not None:
        network.added = parallelize(module, ranks.tensor)
    network.shard(computes_low(spec))
    network.fill(spec)
    network.root(network.try_out)
    return network
