"""Options of the local backend, which users set with ``--ROLE.NAME``."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Lt

from rlflow.errors import PlanError


@dataclass(frozen=True)
class TrainerSettings:
    """Options of a trainer: AdamW (Loshchilov and Hutter 2019), learning-rate schedule, size of passes, and
    adapters."""

    lr: Annotated[float, Ge(0), Lt(inf)] = 1e-6  # learning rate; more learns faster, until it diverges
    # how the rate falls to 0 over the run; constant never falls
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    # optimizer steps over which the rate rises to lr; more protects a fresh optimizer
    warmup: Annotated[int, Ge(0)] = 0
    beta1: Annotated[float, Ge(0), Lt(1)] = 0.9  # memory of the gradient's mean; more smooths and lags
    # memory of the gradient's square; less adapts faster to its scale
    beta2: Annotated[float, Ge(0), Lt(1)] = 0.999
    # floor of the gradient's scale; more slows parameters with tiny gradients
    eps: Annotated[float, Gt(0), Lt(inf)] = 1e-8
    # pulls weight matrices towards 0; biases and norms never decay
    weight_decay: Annotated[float, Ge(0), Lt(inf)] = 0.0
    max_grad_norm: Annotated[float, Gt(0)] = 1.0  # longer gradients are cut to this length; inf never cuts
    # tokens per forward and backward; more is faster and takes more memory
    micro_tokens: Annotated[int, Ge(1)] = 16384
    # on a CPU: no padding, and a common prefix of prompts runs through the model once; false: each row by
    # itself
    packed: bool = True
    # tokens whose logits exist at once; less saves memory; 0: as many as have 2^28 of them
    logit_tokens: Annotated[int, Ge(0)] = 0
    # true compiles layers when the model is loaded, in about twenty seconds; docs/performance.md says when it
    # pays
    compile: bool = False
    # true recomputes layers in the backward pass: a third slower, far less memory
    gradient_checkpointing: bool = False
    # rank of low-rank adapters, which learn instead of the weights; 0 trains the weights themselves
    lora: Annotated[int, Ge(0)] = 0
    # adapters are scaled by alpha / rank; more acts like a higher lr
    lora_alpha: Annotated[float, Gt(0), Lt(inf)] = 16.0
    # the linear layers of the backbone that get an adapter
    lora_targets: Literal["all-linear", "attention"] = "all-linear"


@dataclass(frozen=True)
class GeneratorSettings:
    """Options of a generator that control how much is sampled at once."""

    # tokens of key-value cache at once; more is faster and takes more memory
    batch_tokens: Annotated[int, Ge(1)] = 65536


def refuse_compile(settings: TrainerSettings, backend: str) -> None:
    """Raise PlanError if ``compile`` is set. Called by trainers whose processes don't hold complete
    layers."""
    if settings.compile:
        raise PlanError.of(
            "compile",
            f"the {backend} trainer does not compile layers",
            found="--compile true",
            expected="--compile false, which is the default",
            remedy="leave --compile out, or train with --backend local",
        )
