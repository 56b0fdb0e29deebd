"""A Hugging Face causal model in two parts: a backbone that computes hidden states, and a head that is
applied to selected positions."""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    modeling_utils,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging

from rlflow.backends.local import lora, rotary
from rlflow.backends.local.settings import TrainerSettings
from rlflow.errors import PlanError, listed
from rlflow.training import pretrained
from rlflow.training.protocols import Head, ModelSpec

LOW = (torch.bfloat16, torch.float16)
VALUE_HEAD = "value_head.safetensors"
ALIGNED = 64  # bytes: alignment of tensors in torch's allocator
Transform = Callable[[Tensor], Tensor]
# (Auto class, ModelSpec, dtype, names of weights that may be missing, options of the config) → model
Load = Callable[..., Any]


class Network:
    """A model with its head.

    module: the Hugging Face model, always in evaluation mode (no dropout). head: a linear map to one number,
    for values and scores; None for log-probs. amp: the dtype of autocast; None for no autocast. adapted: name
    → layer with a LoRA adapter. takes: the names of the backbone's arguments. read: the language-model head.
    vocabulary: the number of its logits. transform: the function that the model applies to logits after its
    head, found by a trial. asleep: True if the weights are offloaded. reach: the length in tokens of the
    longest row for which its rotary frequencies are right; None if there is no limit.
    """

    def __init__(self, module: Any, kind: Head, head: nn.Linear | None) -> None:
        self.module, self.kind, self.head = module, kind, head
        self.amp: torch.dtype | None = None
        self.adapted: dict[str, Any] = lora.adapted(module)
        self.backbone = module.base_model
        # otherwise transformers inspects the tokens in every pass, which waits for a GPU
        self.backbone.warn_if_padding_and_no_attention_mask = _silent
        self.takes = set(inspect.signature(self.backbone.forward).parameters)
        self.read: Transform = module.get_output_embeddings()
        self.vocabulary = module.get_output_embeddings().weight.shape[0] if kind == "logprobs" else 0
        self.transform: Transform | None = None
        self.asleep = False
        self.reach: int | None = None

    def try_out(self) -> None:
        """Check that the model is causal, and find the function that it applies to its logits. Raises
        PlanError if the model is not supported.

        Call this after the weights are loaded and before autocast is set, because the check needs exact
        numbers.
        """
        _check_causal(self)
        if self.kind == "logprobs":
            self.transform = _logit_transform(self)

    def hold_rotary(self, longest: int) -> None:
        """Fix the rotary frequencies for rows of at most ``longest`` tokens (``rotary.hold``). Call this
        before any computation."""
        self.reach = rotary.hold(self.module, longest)

    def check_row(self, tokens: int) -> None:
        """Raise PlanError if a row of this many tokens needs rotary frequencies other than the fixed ones."""
        if self.reach is not None and tokens > self.reach:
            raise PlanError.of(
                "longest-row",
                f"{type(self.module).__name__} has rotary frequencies for shorter rows",
                found=f"a row of {tokens} tokens",
                expected=f"at most {self.reach}, for which its frequencies were chosen",
                remedy=f"start a new run with --longest-row {tokens} or more, or use shorter rows: "
                "--data.max_prompt, max_tokens",
            )

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.module.device

    def hidden(self, ids: Tensor, positions: Tensor, **options: Any) -> Tensor:
        """Return the hidden states [rows, L, hidden] of the tokens ``ids`` [rows, L]. positions: [rows or 1,
        L]."""
        self.check_awake()
        if "position_ids" in self.takes:
            options["position_ids"] = positions
        with self.precision():
            return self.backbone(input_ids=ids, **options).last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., vocabulary], including the model's own scaling or soft capping. With
        scaling or soft capping, logits are float32 (float64 for a float64 model). Otherwise they are the
        head's output, which may be bfloat16."""
        with self.precision():
            logits = self.read(hidden)
        if self.transform is as_it_is:
            return logits
        return self.transform(logits.float() if logits.dtype in LOW else logits)

    def numbers(self, hidden: Tensor) -> Tensor:
        """Return the values or scores [...] that the linear head computes. They have the dtype of the head
        and are never rounded to bfloat16."""
        return self.head(hidden.to(self.head.weight.dtype))[..., 0]

    def precision(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which the model computes: autocast to ``amp``, or no autocast if ``amp`` is
        None."""
        return torch.autocast(self.device.type, self.amp) if self.amp else contextlib.nullcontext()

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return Hugging Face name → parameter for all trained parameters, including the value head. A tied
        parameter appears once.

        The language-model head of a critic is not trained. With adapters, the adapters are trained and the
        backbone is not.
        """
        named = {lora.plain(name): p for name, p in self.module.named_parameters() if p.requires_grad}
        if self.kind == "values":
            unused = self.module.get_output_embeddings().weight
            tied = self.module.get_input_embeddings().weight is unused
            named = {name: p for name, p in named.items() if tied or p is not unused}
            named |= {f"value_head.{name}": p for name, p in self.head.named_parameters()}
        return named

    def tensors(self, precise: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, tensor) for each weight and buffer of the model. A tied weight comes
        once. Adapters are merged into new tensors, which have the weights' dtype, or, with ``precise``, the
        adapters' dtype."""
        for (name, *_), tensor in self.own():
            layer = self.adapted.get(name.removesuffix(".weight"))
            yield (
                name,
                self.whole(tensor)
                if layer is None
                else lora.merged(layer, self.whole(tensor), self.whole, precise),
            )

    def merging(self) -> Iterator[tuple[Any, Tensor]]:
        """Yield (layer, its complete weight) for each layer that has an adapter."""
        for (name, *_), tensor in self.own():
            if (layer := self.adapted.get(name.removesuffix(".weight"))) is not None:
                yield layer, self.whole(tensor)

    def whole(self, tensor: Tensor) -> Tensor:
        """Return the complete tensor. In a subclass, other processes may hold parts of a tensor of the
        network or its optimizer."""
        return tensor

    def put(self, target: Tensor, value: Tensor) -> None:
        """Write the complete ``value`` into a tensor of the network or its optimizer, in place. If both share
        their memory, nothing is done."""
        if target.data_ptr() != value.data_ptr():
            target.copy_(value)

    def own(self) -> Iterator[tuple[list[str], Tensor]]:
        """Yield (all names, tensor) for each weight and buffer, without adapters. A tied weight has several
        names and comes once."""
        self.check_awake()
        groups: dict[Any, tuple[list[str], Tensor]] = {}
        for name, tensor in self.module.state_dict(keep_vars=True).items():
            if not (self.adapted and lora.is_adapter(name)):
                groups.setdefault(self.identity(tensor) or name, ([], tensor.detach()))[0].append(
                    lora.plain(name)
                )
        return iter(groups.values())

    def identity(self, tensor: Tensor) -> Any:
        """Return a key that is the same for all names of a tied weight; None for an empty tensor."""
        return (tensor.data_ptr(), tensor.shape) if tensor.numel() else None

    def share(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """From now on, compute with ``tensors`` instead of this network's own weights of the same names. A
        tensor with a different dtype or device is ignored."""
        shared, own = dict(tensors), self.module.state_dict(keep_vars=True)
        for names, _ in self.own():
            tensor = next((shared[name] for name in names if name in shared), None)
            for name in names:
                if tensor is not None and (tensor.dtype, tensor.device) == (
                    own[name].dtype,
                    own[name].device,
                ):
                    own[name].data = tensor.detach()

    def copy(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Copy ``tensors`` into the weights with the same names, and reset adapters. Raises ValueError if a
        name is unknown, a shape differs, or a weight is missing."""
        groups = list(self.own())
        own = {name: tensor for names, tensor in groups for name in names}
        missing, first = (
            {names[0] for names, _ in groups},
            {name: names[0] for names, _ in groups for name in names},
        )
        with torch.no_grad():
            for name, tensor in tensors:
                if name not in own:
                    raise ValueError(f"weights: found '{name}', expected one of {listed(own, 8)}")
                if own[name].shape != tensor.shape:
                    raise ValueError(
                        f"weights: found '{name}' {list(tensor.shape)}, expected the shape "
                        f"{list(own[name].shape)}"
                    )
                self.put(own[name], tensor)
                missing.discard(first[name])
        if missing:
            raise ValueError(
                f"weights: found no {listed(sorted(missing), 8)}, expected every weight of the model"
            )
        if self.adapted:
            lora.clear(self.module)

    def check_awake(self) -> None:
        """Raise ValueError if the weights are offloaded, because computing with empty storages would crash
        the process."""
        if self.asleep:
            raise ValueError("found weights that are asleep, expected wake() before they are used")

    def held(self) -> Iterator[Tensor]:
        """Yield the tensors of model and head that are in this process's memory."""
        for module in (self.module, self.head):
            yield from (*module.parameters(), *module.buffers()) if module is not None else ()

    def to(self, device: torch.device | str) -> None:
        """Move model and head to a device."""
        self.module.to(device)
        if self.head is not None:
            self.head.to(device)

    def save(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder, including the value head."""
        merged = dict(self.tensors(precise=True)) if self.adapted else None
        self.write(folder, merged, self.head.state_dict() if self.kind == "values" else {})

    def write(self, folder: Path, tensors: dict[str, Tensor] | None, head: dict[str, Tensor]) -> None:
        """Write a model folder with the weights ``tensors`` and the value head ``head``. If ``tensors`` is
        None, write the model's own weights. If adapters are merged into the weights, all weights are written
        in float32, the dtype of a trained model without adapters."""
        if self.adapted and tensors is not None:
            tensors = {
                name: tensor.float() if tensor.dtype in LOW else tensor for name, tensor in tensors.items()
            }
        with quiet(), unwrapped(), _generation_as_it_is(self.module, folder):
            self.module.save_pretrained(folder, state_dict=tensors)
        if self.adapted and self.module.dtype in LOW:
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}, indent=2) + "\n")
        if head:
            save_file(
                {name: tensor.detach().cpu().contiguous() for name, tensor in head.items()},
                folder / VALUE_HEAD,
            )


def _silent(*_: Any) -> None:
    """Replace transformers' warning about padding. The warning is not needed, because masks are passed
    wherever padding could be read."""


def load_network(spec: ModelSpec, settings: TrainerSettings | None = None) -> Network:
    """Load the model in ``spec.folder`` with the head that ``spec`` requests, and return its network. No code
    from the folder is run, and nothing is downloaded.

    A frozen model has the dtype ``spec.dtype``. A trained bfloat16 model keeps float32 weights and computes
    in bfloat16. If ``settings`` request adapters, a trained model gets them, and its other weights are
    frozen. Raises PlanError if the folder does not contain such a model.
    """
    module, head = parts(spec, settings, load_whole)
    network = Network(module, spec.head, head)
    network.hold_rotary(spec.longest)
    for weight, value in lora.beginnings(module, spec.seed):
        network.put(weight, value)
    network.to(spec.device)
    network.try_out()
    network.amp = torch.bfloat16 if computes_low(spec) else None
    return network


def computes_low(spec: ModelSpec) -> bool:
    """Return True if the model keeps float32 weights but computes in bfloat16."""
    return spec.dtype == "bfloat16" and spec.trained


def parts(spec: ModelSpec, settings: TrainerSettings | None, load: Load) -> tuple[Any, nn.Linear | None]:
    """Return (model, head). ``load`` loads the model. The head is None for log-probs. Adapters are added but
    not initialised. See ``load_network``."""
    adapters = settings if settings is not None and settings.lora and spec.trained else None
    if adapters:
        lora.peft_package()  # if peft is missing, raise before reading the weights
    if spec.trained and spec.dtype == "float16":
        raise PlanError.of(
            "dtype",
            "float16 cannot be trained without loss scaling",
            found="float16",
            expected="bfloat16 or float32",
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
        if head is not None:  # the head is new, so all its weights are trained
            head.to(torch.promote_types(head.weight.dtype, torch.float32)).requires_grad_(True)
    return module, head


def _head(module: Any, spec: ModelSpec) -> nn.Linear | None:
    if spec.head == "values":
        return value_head(module, spec.folder).requires_grad_(spec.trained)
    return module.score if spec.head == "scores" else None


def value_head(module: Any, folder: Path) -> nn.Linear:
    """Return a linear map from hidden states to one value. Its weights come from ``folder`` if they were
    saved there; otherwise they are zero."""
    weight = module.get_output_embeddings().weight
    head = nn.Linear(weight.shape[1], 1, dtype=torch.promote_types(weight.dtype, torch.float32))
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    if (folder / VALUE_HEAD).is_file():
        head.load_state_dict(load_file(folder / VALUE_HEAD))
    return head


def checkpoint_layers(module: Any) -> None:
    """Make each layer recompute its activations in the backward pass (gradient checkpointing). Only the flag
    ``training`` of the layers is set, so dropout stays off."""
    # in releases with the newer name, the older name warns
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
        )
    return pretrained.read_config(spec.folder)


@contextlib.contextmanager
def readable(spec: ModelSpec) -> Iterator[None]:
    """Return a context in which errors of transformers and safetensors about an unreadable folder become
    PlanErrors."""
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
    """Load a model of the Auto class ``kind`` completely. Raises PlanError if the folder lacks a weight that
    is not in ``allowed``, or if a weight has a wrong shape or is not finite."""
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
        )
    _check_finite(module, spec)
    return _aligned(module)


def _check_finite(module: Any, spec: ModelSpec) -> None:
    """Raise PlanError if weights have NaN or infinities, because every number of the run would then be
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
    """Copy weights that do not have torch's memory alignment. Weights from files may lack it, and the
    rounding of products can depend on alignment."""
    for tensor in module.parameters():
        if tensor.data_ptr() % ALIGNED:
            tensor.data = tensor.data.clone()
    return module


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Return a context in which transformers shows no reports and no progress bars."""
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
def _generation_as_it_is(module: Any, folder: Path) -> Iterator[None]:
    """Return a context for saving a model with its generation config exactly as it was loaded. Without it,
    transformers refuses to save some generation configs, such as one with top_k but without do_sample."""
    generation = getattr(module, "generation_config", None)
    if generation is None:
        yield
        return
    module.generation_config = GenerationConfig()
    try:
        yield
    finally:
        module.generation_config = generation
    if (folder / pretrained.GENERATION).is_file():
        generation.to_json_file(folder / pretrained.GENERATION, keys_to_pop=["compile_config"])


@contextlib.contextmanager
def unwrapped() -> Iterator[None]:
    """Return a context in which `save_pretrained` does not search for wrappers, which rlflow's models do not
    have. If accelerate and DeepSpeed are installed, the search imports both, which takes seconds and prints a
    line."""
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
        )
    return module


def _scorer(spec: ModelSpec, config: Any, dtype: torch.dtype, load: Load) -> Any:
    """Return a sequence classifier with one label. If a language model without a score head is to be trained,
    its new head is zero."""
    has_head = any(name.endswith("ForSequenceClassification") for name in config.architectures or ())
    if not has_head and not spec.trained:
        raise PlanError.of(
            "no-score-head",
            "a frozen reward model without a score head would give every row the same score",
            found=f"{spec.folder}: {listed(config.architectures or ())}",
            expected="a …ForSequenceClassification",
        )
    if has_head and config.num_labels != 1:
        raise PlanError.of(
            "labels",
            "a reward model gives one number",
            found=f"{config.num_labels} labels in {spec.folder}",
            expected="num_labels = 1",
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
        )
    if not has_head:
        nn.init.zeros_(module.score.weight)
    return module


def as_it_is(logits: Tensor) -> Tensor:
    """Return ``logits`` unchanged: the function of a model that applies nothing after its head."""
    return logits


def _candidates(config: Any) -> Iterator[Transform]:
    """Yield the functions that a model may apply to its logits, according to its config: soft capping
    (Gemma), scaling (Cohere, Granite), or none."""
    cap, scale, divisor = (
        getattr(config, name, None) for name in ("final_logit_softcapping", "logit_scale", "logits_scaling")
    )
    if cap:
        yield lambda logits: (logits / cap).tanh() * cap
    if scale:
        yield lambda logits: logits * scale
    if divisor:
        yield lambda logits: logits / divisor
        yield lambda logits: logits * divisor
    yield as_it_is


@torch.no_grad()
def _check_causal(network: Network) -> None:
    """Raise PlanError if a change of the last token changes the hidden states before it. In such a model, the
    tokens after the end of a row would change its numbers."""
    vocabulary = network.module.get_input_embeddings().weight.shape[0]
    ids, places = (
        torch.arange(4, device=network.device)[None] % vocabulary,
        torch.arange(4, device=network.device)[None],
    )
    other = torch.cat([ids[:, :3], ids[:, :1] + vocabulary - 1], 1)
    one, another = (network.hidden(each, places, use_cache=False)[:, :3].float() for each in (ids, other))
    close = 1e-4 if network.module.dtype in (torch.float32, torch.float64) else 0.02
    if not torch.allclose(one, another, rtol=close, atol=close * float(one.abs().max())):
        raise PlanError.of(
            "not-causal",
            f"{type(network.module).__name__} also reads the tokens after a token",
            found="hidden states that change with a later token",
            expected="a causal model such as Llama, Qwen or Gemma",
            remedy="name another folder with --model; for an encoder of transformers, is_decoder may be "
            "false in its config",
        )


@torch.no_grad()
def _logit_transform(network: Network) -> Transform:
    """Return the function that the model applies to its head's logits, such as a scale or a soft cap.

    Known functions are tried on a few tokens until one reproduces the model's own logits. In this trial, the
    head's output is spread over [-30, 30], because a soft cap hardly changes small logits.
    """
    module = network.module
    ids = torch.arange(4, device=network.device)[None] % module.get_output_embeddings().weight.shape[0]
    spread = module.get_output_embeddings().register_forward_hook(
        lambda _, __, x: x + torch.linspace(-30, 30, x.shape[-1]).to(x)
    )
    try:
        own = module(input_ids=ids, use_cache=False).logits.float()
        raw = module.get_output_embeddings()(
            network.hidden(ids, torch.arange(4, device=network.device)[None])
        ).float()
    finally:
        spread.remove()
    error = 0.02 if raw.dtype != module.dtype else 1e-4
    for transform in _candidates(module.config.get_text_config()):
        if torch.allclose(transform(raw), own, rtol=error, atol=error * float(own.abs().max())):
            return transform
    raise PlanError.of(
        "logits",
        f"{type(module).__name__} transforms its logits in an unknown way",
        found="logits that differ from its head's output",
        expected="at most soft capping or a scale that its config names",
    )
