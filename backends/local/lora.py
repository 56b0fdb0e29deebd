"""Low-rank adapters (LoRA, Hu et al. 2022) through peft: the model's own weights stay, two thin matrices beside each linear layer learn."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rlflow.backends.local.settings import TrainerSettings
from rlflow.errors import PlanError
from rlflow.extras import require

ADAPTER = "default"  # peft's name for the only one
Whole = Callable[[Tensor], Tensor]  # all of a tensor of which this process may hold a part


def peft_package() -> Any:
    """peft. Raises PlanError where it is not installed."""
    return require("peft", extra="lora")


def add_adapters(module: Any, settings: TrainerSettings) -> None:
    """Put an adapter beside each linear layer of the backbone that ``settings`` names, in place; nothing else of the backbone learns.

    The layer's output gains alpha / rank · B(A x). Both are float32 or better. Raises PlanError where no layer is named.
    """
    chosen = {name: layer for name, layer in _linear(module) if settings.lora_targets == "all-linear" or "att" in name}
    if not chosen:
        raise PlanError.of("lora-targets", f"{type(module).__name__} has no layer that an adapter could stand beside",
                           found=f"no linear layer for lora_targets = {settings.lora_targets}", expected="linear layers in its backbone",
                           remedy="--lora-targets all-linear, or train without adapters: --lora 0")
    transposed = any(isinstance(layer, Conv1D) for layer in chosen.values())
    config = peft_package().LoraConfig(r=settings.lora, lora_alpha=settings.lora_alpha, fan_in_fan_out=transposed,
                                       target_modules=[f"module.{name}" for name in chosen])
    holder = nn.ModuleDict({"module": module})  # hides the model's config, by which peft renames targets of experts
    peft_package().inject_adapter_in_model(config, holder)
    for layer in adapted(module).values():
        for linear in (layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]):
            linear.to(torch.promote_types(linear.weight.dtype, torch.float32))


def beginnings(module: Any, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(an adapter's weight, what it begins with): A is drawn from ``seed``, B is zero, so that the model is unchanged at first."""
    chance = torch.Generator().manual_seed(seed)
    for layer in adapted(module).values():
        a, b = layer.lora_A[ADAPTER].weight.detach(), layer.lora_B[ADAPTER].weight.detach()
        yield a, nn.init.kaiming_uniform_(torch.empty(a.shape, dtype=a.dtype), a=math.sqrt(5), generator=chance)
        yield b, torch.zeros(b.shape, dtype=b.dtype)


def _linear(module: Any) -> Iterator[tuple[str, nn.Module]]:
    """The linear layers of the backbone: neither the language-model head nor a score head."""
    inside = set(module.base_model.modules())
    return ((name, layer) for name, layer in module.named_modules() if isinstance(layer, nn.Linear | Conv1D) and layer in inside)


def adapted(module: Any) -> dict[str, Any]:
    """Name → layer with an adapter."""
    return {name: layer for name, layer in module.named_modules() if hasattr(layer, "lora_A") and hasattr(layer, "base_layer")}


def is_adapter(name: str) -> bool:
    """Whether a parameter of that name belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def plain(name: str) -> str:
    """The name of a weight as the model has it without adapters; an adapter's as peft writes it."""
    return name.replace(".base_layer.", ".").replace(f".{ADAPTER}.", ".") if ".base_layer." in name or is_adapter(name) else name


@torch.no_grad()
def merged(layer: Any, weight: Tensor, whole: Whole) -> Tensor:
    """A new tensor: the layer's ``weight``, all of it, with its adapter added, in the weight's dtype."""
    a, b = whole(layer.lora_A[ADAPTER].weight), whole(layer.lora_B[ADAPTER].weight)
    delta = (b @ a).mT if layer.fan_in_fan_out else b @ a
    return (weight.to(delta.dtype) + delta * layer.scaling[ADAPTER]).to(weight.dtype)


@torch.no_grad()
def clear(module: Any) -> None:
    """Adapters that change nothing: B is zero."""
    for layer in adapted(module).values():
        layer.lora_B[ADAPTER].weight.zero_()


def digest(module: Any, whole: Whole) -> Tensor:
    """uint8 [32], the sha256 of all that does not learn: which base the adapters belong to."""
    total = hashlib.sha256()
    learning = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    for name, tensor in module.state_dict().items():
        if name not in learning:
            total.update(f"{plain(name)} {tensor.dtype} {list(tensor.shape)}\n".encode())
            total.update(whole(tensor.detach()).cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return torch.tensor(list(total.digest()), dtype=torch.uint8)
