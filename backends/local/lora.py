"""Low-rank adapters (LoRA, Hu et al. 2022) with peft. The model's weights are frozen, and each adapted linear
layer gets two thin matrices to train."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from rlflow.backends.local.settings import TrainerSettings
from rlflow.backends.local.transformers_internals import Conv1D
from rlflow.errors import PlanError
from rlflow.extras import require

ADAPTER = "default"  # peft's name for a single adapter
Whole = Callable[[Tensor], Tensor]  # gathers a complete tensor if this process holds only a part


def peft_package() -> Any:
    """Import and return peft. Raises PlanError if it isn't installed."""
    return require("peft", extra="lora")


def add_adapters(module: Any, settings: TrainerSettings) -> None:
    """Add an adapter, in place, to each linear layer of the backbone selected by ``settings.lora_targets``.
    All other weights of the backbone stay frozen.

    An adapted layer computes W x + alpha / rank · B(A x), with A and B in float32 or better. Raises PlanError
    if no layer is selected.
    """
    chosen = {
        name: layer
        for name, layer in _linear(module)
        if settings.lora_targets == "all-linear" or "att" in name
    }
    if not chosen:
        raise PlanError.of(
            "lora-targets",
            f"{type(module).__name__} has no layer for an adapter",
            found=f"no linear layer for lora_targets = {settings.lora_targets}",
            expected="linear layers in its backbone",
            remedy="--lora-targets all-linear, or train without adapters: --lora 0",
        )
    transposed = any(isinstance(layer, Conv1D) for layer in chosen.values())
    config = peft_package().LoraConfig(
        r=settings.lora,
        lora_alpha=settings.lora_alpha,
        fan_in_fan_out=transposed,
        target_modules=[f"module.{name}" for name in chosen],
    )
    # this wrapper hides the model's config, which peft would use to rename targets of experts
    holder = nn.ModuleDict({"module": module})
    peft_package().inject_adapter_in_model(config, holder)
    for layer in adapted(module).values():
        for linear in (layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]):
            linear.to(torch.promote_types(linear.weight.dtype, torch.float32))


def beginnings(module: Any, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each adapter weight with its initial value. A is drawn from ``seed`` and B is zero, so new
    adapters don't change the model."""
    rng = torch.Generator().manual_seed(seed)
    for layer in adapted(module).values():
        a, b = layer.lora_A[ADAPTER].weight.detach(), layer.lora_B[ADAPTER].weight.detach()
        yield (
            a,
            nn.init.kaiming_uniform_(torch.empty(a.shape, dtype=a.dtype), a=math.sqrt(5), generator=rng),
        )
        yield b, torch.zeros(b.shape, dtype=b.dtype)


def _linear(module: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield the backbone's linear layers by name, leaving out the language-model head and the score head."""
    inside = set(module.base_model.modules())
    return (
        (name, layer)
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear | Conv1D) and layer in inside
    )


def adapted(module: Any) -> dict[str, Any]:
    """Return the layers that have an adapter, by name."""
    return {
        name: layer
        for name, layer in module.named_modules()
        if hasattr(layer, "lora_A") and hasattr(layer, "base_layer")
    }


def is_adapter(name: str) -> bool:
    """Return True if a parameter with this name belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def plain(name: str) -> str:
    """Return a weight's name in the model without adapters or, for an adapter, the name that peft writes to
    files."""
    return (
        name.replace(".base_layer.", ".").replace(f".{ADAPTER}.", ".")
        if ".base_layer." in name or is_adapter(name)
        else name
    )


@torch.no_grad()
def merged(layer: Any, weight: Tensor, whole: Whole, precise: bool = False) -> Tensor:
    """Return the sum of a layer's complete ``weight`` and its adapter, as a new tensor in the weight's dtype.

    precise: use the adapter's dtype (float32 or better) instead. whole: gathers a complete tensor.
    """
    delta = _delta(layer, whole)
    summed = weight.to(delta.dtype) + delta
    return summed if precise else summed.to(weight.dtype)


def _delta(layer: Any, whole: Whole) -> Tensor:
    """Return the matrix that a layer's adapter adds to its weight."""
    a, b = whole(layer.lora_A[ADAPTER].weight), whole(layer.lora_B[ADAPTER].weight)
    return ((b @ a).mT if layer.fan_in_fan_out else b @ a) * layer.scaling[ADAPTER]


@torch.no_grad()
def rounding(layers: Iterable[tuple[Any, Tensor]], whole: Whole) -> float:
    """Return how much of what adapters have learned is lost to rounding when they are merged: |merged -
    weight - delta| / |delta| over all layers, or 0 if they have learned nothing.

    layers: (layer, its complete weight) pairs.
    """
    lost = learned = 0.0
    for layer, weight in layers:
        delta = _delta(layer, whole)
        before = weight.to(delta.dtype)
        kept = (before + delta).to(weight.dtype).to(delta.dtype) - before
        lost += float((kept - delta).square().sum(dtype=torch.float64))
        learned += float(delta.square().sum(dtype=torch.float64))
    return math.sqrt(lost / learned) if learned else 0.0


def save_adapter(
    module: Any, settings: TrainerSettings, weights: Mapping[str, Tensor], base: Path | None, folder: Path
) -> None:
    """Write adapters to ``folder`` in PEFT's format.

    weights: the complete tensors by name (as returned by ``plain``), including those of a score head that is
    trained. base: the folder of the model that the adapters belong to.
    """
    names, scores = list(adapted(module)), [name for name in weights if not is_adapter(name)]
    config = peft_package().LoraConfig(
        r=settings.lora,
        lora_alpha=settings.lora_alpha,
        target_modules=_targets(module, names),
        fan_in_fan_out=_transposed(module),
        modules_to_save=sorted({name.rpartition(".")[0] for name in scores}) or None,
        base_model_name_or_path=str(base) if base else None,
        task_type="SEQ_CLS" if scores else "CAUSAL_LM",
        inference_mode=True,
    )
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    save_file(
        {f"base_model.model.{name}": tensor.detach().cpu().contiguous() for name, tensor in weights.items()},
        folder / "adapter_model.safetensors",
        {"format": "pt"},
    )


def _targets(module: Any, names: list[str]) -> list[str]:
    """Return the adapted layers for PEFT's config: just the last parts of their names (such as q_proj) if
    every layer with such a name has an adapter, and full names otherwise."""
    last = {name.rpartition(".")[2] for name in names}
    others = {
        name.rpartition(".")[2]
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear | Conv1D)
        and name not in names
        and ".lora_" not in name
        and not name.endswith(".base_layer")
    }
    return sorted(names) if last & others else sorted(last)


def _transposed(module: Any) -> bool:
    return any(layer.fan_in_fan_out for layer in adapted(module).values())


@torch.no_grad()
def clear(module: Any) -> None:
    """Set B to zero in all adapters, so they no longer change the model."""
    for layer in adapted(module).values():
        layer.lora_B[ADAPTER].weight.zero_()


def digest(module: Any, whole: Whole) -> Tensor:
    """Return the sha256 of all frozen weights, uint8 [32], which identifies the weights that adapters belong
    to. ``whole`` gathers a complete tensor."""
    total = hashlib.sha256()
    learning = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    for name, tensor in module.state_dict().items():
        if name not in learning:
            total.update(f"{plain(name)} {tensor.dtype} {list(tensor.shape)}\n".encode())
            total.update(whole(tensor.detach()).cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return torch.tensor(list(total.digest()), dtype=torch.uint8)
