"""What a user may set of the local backend: ``--ROLE.NAME``."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Lt

from rlflow.errors import PlanError


@dataclass(frozen=True)
class TrainerSettings:
    """AdamW (Loshchilov and Hutter 2019), its schedule, and how much is computed at once."""

    lr: Annotated[float, Ge(0), Lt(inf)] = 1e-6  # learning rate; more learns faster, until it diverges
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # how the rate falls to 0 over the run; constant never falls
    warmup: Annotated[int, Ge(0)] = 0  # optimizer steps over which the rate rises to lr; more protects a fresh optimizer
    beta1: Annotated[float, Ge(0), Lt(1)] = 0.9  # memory of the gradient's mean; more smooths and lags
    beta2: Annotated[float, Ge(0), Lt(1)] = 0.999  # memory of the gradient's square; less adapts faster to its scale
    eps: Annotated[float, Gt(0), Lt(inf)] = 1e-8  # floor of the gradient's scale; more slows parameters with tiny gradients
    weight_decay: Annotated[float, Ge(0), Lt(inf)] = 0.0  # pulls weight matrices towards 0; biases and norms never decay
    max_grad_norm: Annotated[float, Gt(0)] = 1.0  # longer gradients are cut to this length; inf never cuts
    micro_tokens: Annotated[int, Ge(1)] = 16384  # tokens per forward and backward; more is faster and takes more memory
    packed: bool = True  # on a CPU: no padding, and what prompts begin with alike is computed once; false computes each row by itself
    logit_tokens: Annotated[int, Ge(0)] = 0  # tokens whose logits exist at once; less saves memory; 0: as many as have 2^28 of them
    compile: bool = False  # true compiles layers when the model is loaded, some twenty seconds; docs/performance.md says where it pays
    gradient_checkpointing: bool = False  # true recomputes layers in the backward pass: a third slower, far less memory
    lora: Annotated[int, Ge(0)] = 0  # rank of low-rank adapters, which learn in place of the weights; 0 trains the weights themselves
    lora_alpha: Annotated[float, Gt(0), Lt(inf)] = 16.0  # adapters count alpha / rank times; more acts like a higher lr
    lora_targets: Literal["all-linear", "attention"] = "all-linear"  # the linear layers of the backbone that get an adapter


@dataclass(frozen=True)
class GeneratorSettings:
    """How much is sampled at once."""

    batch_tokens: Annotated[int, Ge(1)] = 65536  # tokens of key-value cache at once; more is faster and takes more memory


def refuse_compile(settings: TrainerSettings, backend: str) -> None:
    """Raises PlanError where ``compile`` is set, for a trainer whose layers are no whole modules of one process."""
    if settings.compile:
        raise PlanError.of("compile", f"the {backend} trainer does not compile layers", found="--compile true",
                           expected="--compile false, which is the default", remedy="leave --compile out, or train with --backend local")
