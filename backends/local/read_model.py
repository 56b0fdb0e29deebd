"""Read a model folder into a network's modules: the backbone with its head, or a value head."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.utils import logging

from rlflow.backends.local import lora
from rlflow.backends.local.settings import TrainerSettings
from rlflow.backends.local.transformers_internals import GradientCheckpointingLayer, modeling_utils
from rlflow.errors import PlanError, listed
from rlflow.training import pretrained
from rlflow.training.protocols import ModelSpec

LOW = (torch.bfloat16, torch.float16)
VALUE_HEAD = "value_head.safetensors"
ALIGNED = 64  # bytes: alignment of tensors in torch's allocator
# (Auto class, ModelSpec, dtype, names of weights that may be missing, options of the config) → model
Load = Callable[..., Any]


def computes_low(spec: ModelSpec) -> bool:
    """Return True if the model has float32 weights but computes in bfloat16."""
    return spec.dtype == "bfloat16" and (spec.trained or spec.follows)


def parts(spec: ModelSpec, settings: TrainerSettings | None, load: Load) -> tuple[Any, nn.Linear | None]:
    """Return the model, as loaded by ``load``, and its head (None for log-probs). Adapters are added but not
    initialised. See ``load_network``."""
    adapters = settings if settings is not None and settings.lora and spec.trained else None
    if adapters:
        lora.peft_package()  # raise before reading the weights if it is missing
    if (spec.trained or spec.follows) and spec.dtype == "float16":
        raise PlanError.of(
            "dtype",
            "float16 cannot be trained without loss scaling",
            found="float16",
            expected="bfloat16 or float32",
            remedy="--dtype bfloat16",
        )
    dtype = torch.float32 if computes_low(spec) and not adapters else getattr(torch, spec.dtype)
    with readable(spec):
        config = _config(spec)
        module = (
            _scorer(spec, config, dtype, load)
            if spec.head == "scores"
            else _language_model(spec, dtype, load)
        )
    module.eval().requires_grad_(spec.trained and not adapters)
    head = _head(module, spec)
    if adapters:
        lora.add_adapters(module, adapters)
        if head is not None:  # the head is new and learns completely
            head.to(torch.promote_types(head.weight.dtype, torch.float32)).requires_grad_(True)
    return module, head


def _head(module: Any, spec: ModelSpec) -> nn.Linear | None:
    if spec.head == "values":
        return value_head(module, spec.folder).requires_grad_(spec.trained)
    return module.score if spec.head == "scores" else None


def value_head(module: Any, folder: Path) -> nn.Linear:
    """Return a linear map from hidden states to one value, with the weights saved in ``folder``, or zeros if
    there are none."""
    weight = module.get_output_embeddings().weight
    head = nn.Linear(weight.shape[1], 1, dtype=torch.promote_types(weight.dtype, torch.float32))
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    if (folder / VALUE_HEAD).is_file():
        head.load_state_dict(load_file(folder / VALUE_HEAD))
    return head


def checkpoint_layers(module: Any) -> None:
    """Make each layer recompute its activations in the backward pass (gradient checkpointing). Only the
    layers' own ``training`` flag is set, so dropout stays off."""
    # where the newer name exists, the older one warns
    newer = getattr(module, "activation_checkpointing_enable", None)
    (newer or module.gradient_checkpointing_enable)({"use_reentrant": False, "preserve_rng_state": False})
    for layer in module.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.training = True
            for name, value in list(vars(layer).items()):
                if "drop" in name and isinstance(value, float):
                    setattr(layer, name, 0.0)


def _config(spec: ModelSpec) -> Any:
    if spec.folder is None or not (spec.folder / "config.json").is_file():
        raise PlanError.of(
            "no-model",
            "the local backend needs a Hugging Face model folder",
            found=str(spec.folder),
            expected="a folder with config.json and safetensors",
            remedy="--model FOLDER",
        )
    return pretrained.read_config(spec.folder)


@contextlib.contextmanager
def readable(spec: ModelSpec) -> Iterator[None]:
    """Turn errors from transformers and safetensors about an unreadable folder into PlanErrors inside a
    ``with`` block."""
    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        raise PlanError.of(
            "model-folder",
            f"the model folder '{spec.folder}' cannot be loaded",
            found=_first_sentence(error),
            expected="config.json of a model that the installed transformers supports, and complete weights "
            "as safetensors",
            remedy="download or save the folder again, or name another with --model",
        ) from error


def _first_sentence(error: Exception) -> str:
    return str(error).partition("\n")[0].partition(". ")[0] or type(error).__name__


def load_whole(
    kind: Any, spec: ModelSpec, dtype: torch.dtype, allowed: tuple[str, ...], **options: Any
) -> Any:
    """Load a complete model of the Auto class ``kind``.

    Raises PlanError if the folder lacks a weight that isn't in ``allowed``, or if a weight has the wrong
    shape or isn't finite.
    """
    assert spec.folder is not None
    with quiet():  # missing weights raise an error below
        module, info = pretrained.read_model(
            kind, spec.folder, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    if other := sorted(
        f"{name} {list(found)}, not {list(wanted)}" for name, found, wanted in info["mismatched_keys"]
    ):
        raise PlanError.of(
            "weights-shape",
            f"weights of the model folder {spec.folder} do not have the shapes of its config",
            found=listed(other, 8),
            expected=f"weights of the {type(module).__name__} that config.json describes",
            remedy="correct config.json, such as its vocab_size, or save the folder again",
        )
    missing = sorted(set(info["missing_keys"]) - set(allowed))
    if missing:
        raise PlanError.of(
            "weights-missing",
            f"the model folder {spec.folder} lacks weights",
            found=f"no {listed(missing, 8)}",
            expected=f"a {type(module).__name__}",
            remedy="save the folder again with all weights, or correct the architecture in its config.json",
        )
    _check_finite(module, spec)
    return _aligned(module)


def _check_finite(module: Any, spec: ModelSpec) -> None:
    """Raise PlanError if weights contain NaN or infinities, which would turn every number of the run into
    NaN."""
    bad = [
        name
        for name, weight in module.named_parameters()
        if weight.numel() and not all(bound.isfinite() for bound in weight.detach().aminmax())
    ]
    if bad:
        raise PlanError.of(
            "weights-not-finite",
            f"weights of the model folder {spec.folder} are not finite",
            found=listed(bad, 8),
            expected="numbers",
            remedy="download or save the folder again, or name another with --model",
        )


def _aligned(module: Any) -> Any:
    """Copy weights that don't have torch's memory alignment. Weights from files may lack it, and it can
    affect how products are rounded."""
    for tensor in module.parameters():
        if tensor.data_ptr() % ALIGNED:
            tensor.data = tensor.data.clone()
    return module


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' reports and progress bars inside a ``with`` block."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextlib.contextmanager
def unwrapped() -> Iterator[None]:
    """Keep `save_pretrained` from searching for wrappers, which rlflow's models don't have, inside a ``with``
    block.

    If accelerate and DeepSpeed are installed, the search imports both, which takes seconds and prints a line.
    """
    search = modeling_utils.unwrap_model
    modeling_utils.unwrap_model = lambda model, recursive=False: model
    try:
        yield
    finally:
        modeling_utils.unwrap_model = search


def _language_model(spec: ModelSpec, dtype: torch.dtype, load: Load) -> Any:
    module = load(AutoModelForCausalLM, spec, dtype, ())
    if module.get_output_embeddings() is None or module.base_model is module:
        raise PlanError.of(
            "no-backbone",
            f"{type(module).__name__} has no separate backbone and language-model head",
            found=str(spec.folder),
            expected="a decoder such as Llama, Qwen or Gemma",
            remedy="use another model, such as one of these",
        )
    return module


def _scorer(spec: ModelSpec, config: Any, dtype: torch.dtype, load: Load) -> Any:
    """Return a sequence classifier with one label. A language model that is to be trained as a scorer but has
    no score head gets a new one, initialised to zero."""
    has_head = any(name.endswith("ForSequenceClassification") for name in config.architectures or ())
    if not has_head and not spec.trained:
        raise PlanError.of(
            "no-score-head",
            "a frozen reward model without a score head would give every row the same score",
            found=f"{spec.folder}: {listed(config.architectures or ())}",
            expected="a …ForSequenceClassification",
            remedy="name a reward model, such as runs/NAME/final/reward after rlflow run reward_model",
        )
    if has_head and config.num_labels != 1:
        raise PlanError.of(
            "labels",
            "a reward model gives one number",
            found=f"{config.num_labels} labels in {spec.folder}",
            expected="num_labels = 1",
            remedy="use a reward model with a single label",
        )
    module = load(
        AutoModelForSequenceClassification, spec, dtype, () if has_head else ("score.weight",), num_labels=1
    )
    if not hasattr(module, "score"):
        raise PlanError.of(
            "no-score-head",
            f"{type(module).__name__} has no linear head named 'score'",
            found=str(spec.folder),
            expected="a decoder such as Llama, Qwen or Gemma",
            remedy="use another model, such as one of these",
        )
    if not has_head:
        nn.init.zeros_(module.score.weight)
    return module
