"""A Hugging Face model whose weights are split across the ranks of a pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from rlflow.author import torch_private
from rlflow.backends.fsdp.files import Files, load_empty
from rlflow.backends.fsdp.ranks import Ranks, box, own, whole
from rlflow.backends.local import lora
from rlflow.backends.local.network import Network
from rlflow.backends.local.read_model import computes_low, parts
from rlflow.backends.local.settings import TrainerSettings
from rlflow.backends.local.transformers_internals import GradientCheckpointingLayer
from rlflow.errors import PlanError, listed
from rlflow.training.protocols import Head, ModelSpec

STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
# a parallel style in some releases of transformers; here, embedding and head are divided together
VOCABULARY = "embedding_rowwise"
# these parameters are complete on each rank, but get a gradient only from the rank's own heads
ADDED = "replicated_with_grad_allreduce"


def parallelize(module: Any, mesh: DeviceMesh) -> list[str]:
    """Split the layers of ``module`` across the tensor-parallel ranks of ``mesh``, in place.

    Returns the names of parameters whose gradients still have to be summed over ``mesh``. Raises PlanError if
    the model has no known tensor-parallel plan or can't be split evenly.
    """
    config = module.config.get_text_config()
    plan = {
        name: style
        for name, style in (getattr(config, "base_model_tp_plan", None) or {}).items()
        if style != VOCABULARY
    }
    _check(module, config, plan, mesh.size())
    inside = module.base_model
    parallelize_module(
        inside, mesh, {name: STYLES[style]() for name, style in plan.items() if style in STYLES}
    )
    _vocabulary(module, mesh)
    prefix = f"{module.base_model_prefix}."
    added = [name for name, style in plan.items() if style == ADDED]
    return [
        name
        for name, _ in module.named_parameters()
        if any(fnmatch(name, f"{prefix}{pattern}.*") for pattern in added)
    ]


def _vocabulary(module: Any, mesh: DeviceMesh) -> None:
    """Split the embedding and the language-model head across ``mesh``, unless the vocabulary doesn't divide
    evenly."""
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    if embedding.weight.shape[0] % mesh.size():
        return
    parallelize_module(embedding, mesh, RowwiseParallel(input_layouts=Replicate()))
    if head is not None:
        parallelize_module(head, mesh, ColwiseParallel(output_layouts=Replicate()))
    if tied:
        head.weight = embedding.weight


def _check(module: Any, config: Any, plan: dict[str, str], ranks: int) -> None:
    name = type(module).__name__
    unknown = sorted(set(plan.values()) - {*STYLES, ADDED})
    if not plan or unknown:
        raise PlanError.of(
            "tensor-parallel",
            f"{name} cannot be split by tensor parallelism here",
            found=f"a plan with {listed(unknown)}" if plan else "no plan in its config",
            expected="a dense decoder with a plan for its linear layers, such as Llama, Qwen3 or Gemma 3",
            remedy="--tensor-parallel 1",
        )
    for what in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if (count := getattr(config, what, ranks)) % ranks:
            raise PlanError.of(
                "tensor-parallel",
                f"{what} of {name} does not divide into {ranks} equal parts",
                found=str(count),
                expected=f"a multiple of {ranks}",
                remedy="a smaller --tensor-parallel",
            )


T = TypeVar("T")


class Root(nn.Module):
    """Holds the model and its head, and can run any computation as its forward pass.

    FSDP2 gathers the weights outside the layers around this forward pass, so the computation can use them.
    """

    def __init__(self, module: nn.Module, head: nn.Module | None) -> None:
        super().__init__()
        self.module, self.head = module, head

    def forward(self, compute: Callable[..., T], *arguments: Any) -> T:
        """Return ``compute(*arguments)``, computed while the weights outside the layers are gathered."""
        return compute(*arguments)


class ShardedNetwork(Network):
    """A network with split weights, whose forward passes run inside ``root``.

    All ranks must read and write its tensors together and in the same order. added: names of parameters whose
    gradients must be summed over the tensor-parallel ranks.
    """

    def __init__(self, module: Any, kind: Head, head: nn.Linear | None, ranks: Ranks) -> None:
        super().__init__(module, kind, head)
        self.root, self.ranks = Root(module, head), ranks
        self.added: list[str] = []

    def whole(self, tensor: Tensor) -> Tensor:
        """Return a complete parameter, gathered from all ranks. Every rank must call this."""
        return whole(tensor.detach())

    def put(self, target: Tensor, value: Tensor) -> None:
        """Write this rank's part of the complete ``value`` into the parameter ``target``."""
        own(target).copy_(value[box(target)])

    def identity(self, tensor: Tensor) -> Any:
        """Return a key that is the same for all names of a tied parameter."""
        return id(tensor)

    def held(self) -> Iterator[Tensor]:
        """Yield this rank's parts of all parameters and buffers."""
        return (own(tensor) for tensor in super().held())

    def to(self, device: torch.device | str) -> None:
        """Move this rank's parts of the model to a device."""
        self.root.to(device)

    def save(self, folder: Path) -> None:
        """Write the model folder. Every rank must call this, but only the pool's first rank writes."""
        tensors = self.host(self.tensors(precise=True))
        head = self.host(
            (name, self.whole(x))
            for name, x in (self.head.state_dict().items() if self.kind == "values" else ())
        )
        if self.ranks.first:
            self.write(folder, tensors, head)

    def host(self, tensors: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Copy the tensors to host memory and return them by name on the pool's first rank, or {} on the
        others. Every rank must call this."""
        copies = {}
        for name, tensor in tensors:
            if self.ranks.first:
                copies[name] = tensor.detach().to("cpu", copy=True)
            del tensor
        return copies

    def shard(self, low: bool) -> None:
        """Shard the model in place over the data-parallel ranks.

        Each layer is sharded on its own, and so is the head, in its own precision. All other parameters are
        sharded together with ``root``. With ``low``, the model computes in bfloat16.

        Gradients are summed over the ranks rather than averaged, because the objective is already divided by
        the totals of all ranks.
        """
        policy = (
            MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            if low
            else MixedPrecisionPolicy()
        )
        for layer in self.backbone.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                fully_shard(layer, mesh=self.ranks.data, mp_policy=policy)
        if self.head is not None:
            fully_shard(self.head, mesh=self.ranks.data)
        fully_shard(self.root, mesh=self.ranks.data, mp_policy=policy, reshard_after_forward=True)
        for unit in self.root.modules():
            if isinstance(unit, FSDPModule):
                unit.set_gradient_divide_factor(1.0)
                unit.set_force_sum_reduction_for_comms(True)  # gloo supports no other reduction with a factor

    @torch.no_grad()
    def fill(self, spec: ModelSpec) -> None:
        """Allocate the parameters and read their weights from the folder. A weight that isn't in the folder
        belongs to a new head and is set to zero."""
        state = self.module.state_dict(keep_vars=True)
        empty = {lora.plain(name) for name, tensor in state.items() if tensor.is_meta}
        torch_private.change_tensors(
            self.root, lambda t: torch.empty_like(t, device=spec.device) if t.is_meta else t.to(spec.device)
        )
        files = Files(Path(str(spec.folder)), self.module.base_model_prefix)
        for names, tensor in self.own():
            if names[0] in empty:
                files.read(names, tensor)
        for weight, value in lora.beginnings(self.module, spec.seed):
            self.put(weight, value)


def load_sharded(spec: ModelSpec, settings: TrainerSettings, ranks: Ranks) -> ShardedNetwork:
    """Load a role's model with its weights split across ranks, and return its network.

    The network gives the same results as one from the local backend's ``load_network``. No rank ever holds
    all the weights, unless ``load_empty`` has to load the complete model.
    """
    module, head = parts(spec, settings, load_empty)
    network = ShardedNetwork(module, spec.head, head, ranks)
    network.hold_rotary(spec.longest)
    if ranks.tensor is not None:
        network.added = parallelize(module, ranks.tensor)
    network.shard(computes_low(spec))
    network.fill(spec)
    network.root(network.try_out)
    return network
