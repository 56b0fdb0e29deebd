"""A Hugging Face causal model in two parts: a backbone that computes hidden states, and a head that is
applied at selected positions."""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GenerationConfig

from rlflow.backends.local import lora, rotary
from rlflow.backends.local.read_model import (
    LOW,
    VALUE_HEAD,
    computes_low,
    load_whole,
    parts,
    quiet,
    unwrapped,
)
from rlflow.backends.local.settings import TrainerSettings
from rlflow.backends.local.transformers_internals import CACHE_ARGUMENTS, Cache
from rlflow.errors import PlanError, listed
from rlflow.training import pretrained
from rlflow.training.protocols import Head, ModelSpec

Transform = Callable[[Tensor], Tensor]


class Network:
    """A model with its head.

    module: the Hugging Face model, always in evaluation mode (no dropout). head: a linear map to one number
    for values and scores, or None for log-probs. amp: the autocast dtype, or None for no autocast. adapted:
    the layers with a LoRA adapter, by name. takes: the backbone's argument names. read: the language-model
    head. vocabulary: how many logits it has. transform: what the model does to logits after its head, found
    by trying. asleep: True if the weights are offloaded. reach: the length in tokens of the longest row for
    which the rotary frequencies are right, or None if there's no limit.
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
        """Check that the model is causal, and find out what it does to its logits. Raises PlanError if the
        model isn't supported.

        Call this after the weights are loaded and before autocast is set, because the check needs exact
        numbers.
        """
        _check_causal(self)
        if self.kind == "logprobs":
            self.transform = _logit_transform(self)

    def hold_rotary(self, longest: int) -> None:
        """Fix the rotary frequencies for rows of up to ``longest`` tokens (``rotary.hold``). Call this before
        anything is computed."""
        self.reach = rotary.hold(self.module, longest)

    def check_row(self, tokens: int) -> None:
        """Raise PlanError if a row of this many tokens would need different rotary frequencies."""
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

    @property
    def cache_argument(self) -> str | None:
        """The backbone's argument for a key-value cache, or None if it has none."""
        return next((name for name in CACHE_ARGUMENTS if name in self.takes), None)

    def hidden(self, ids: Tensor, positions: Tensor, cache: Cache | None = None, **options: Any) -> Tensor:
        """Compute the hidden states [rows, L, hidden] of the tokens ``ids`` [rows, L]. positions: [rows or 1,
        L]. cache: the keys and values of earlier tokens, to which these tokens' are appended."""
        self.check_awake()
        if cache is not None:
            options |= {str(self.cache_argument): cache, "use_cache": True}
        if "position_ids" in self.takes:
            options["position_ids"] = positions
        with self.precision():
            return self.backbone(input_ids=ids, **options).last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute the logits [..., vocabulary], including the model's own scaling or soft capping.

        With scaling or soft capping, logits are float32 (float64 for a float64 model). Otherwise they are the
        head's output, which may be bfloat16.
        """
        with self.precision():
            logits = self.read(hidden)
        if self.transform is as_it_is:
            return logits
        return self.transform(logits.float() if logits.dtype in LOW else logits)

    def numbers(self, hidden: Tensor) -> Tensor:
        """Compute the values or scores [...] with the linear head. They have the head's dtype and are never
        rounded to bfloat16."""
        return self.head(hidden.to(self.head.weight.dtype))[..., 0]

    def precision(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which the model computes: autocast to ``amp``, or no autocast if it is
        None."""
        return torch.autocast(self.device.type, self.amp) if self.amp else contextlib.nullcontext()

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return all trained parameters by Hugging Face name, including the value head. A tied parameter
        appears only once.

        A critic's language-model head isn't trained. With adapters, the adapters are trained and the backbone
        isn't.
        """
        named = {lora.plain(name): p for name, p in self.module.named_parameters() if p.requires_grad}
        if self.kind == "values":
            unused = self.module.get_output_embeddings().weight
            tied = self.module.get_input_embeddings().weight is unused
            named = {name: p for name, p in named.items() if tied or p is not unused}
            named |= {f"value_head.{name}": p for name, p in self.head.named_parameters()}
        return named

    def tensors(self, precise: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield the model's weights and buffers with their Hugging Face names. A tied weight is yielded only
        once.

        Adapters are merged into new tensors, in the weights' dtype or, with ``precise``, in the adapters'.
        """
        for (name, *_), tensor in self.own():
            layer = self.adapted.get(name.removesuffix(".weight"))
            yield (
                name,
                self.whole(tensor)
                if layer is None
                else lora.merged(layer, self.whole(tensor), self.whole, precise),
            )

    def masters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the live weights and buffers as this process holds them, including a value head.

        Layers with adapters are merged into new, complete tensors, in the adapters' dtype.
        """
        for (name, *_), tensor in self.own():
            layer = self.adapted.get(name.removesuffix(".weight"))
            yield (
                name,
                tensor if layer is None else lora.merged(layer, self.whole(tensor), self.whole, precise=True),
            )
        for name, parameter in self.head.named_parameters() if self.kind == "values" else ():
            yield f"value_head.{name}", parameter.detach()

    def merging(self) -> Iterator[tuple[Any, Tensor]]:
        """Yield each layer that has an adapter, with its complete weight."""
        for (name, *_), tensor in self.own():
            if (layer := self.adapted.get(name.removesuffix(".weight"))) is not None:
                yield layer, self.whole(tensor)

    def whole(self, tensor: Tensor) -> Tensor:
        """Return the complete tensor. In a subclass, parts of the network's and optimizer's tensors may be
        held by other processes."""
        return tensor

    def put(self, target: Tensor, value: Tensor) -> None:
        """Write the complete ``value`` into a tensor of the network or its optimizer, in place, unless the
        two already share their memory."""
        if target.data_ptr() != value.data_ptr():
            target.copy_(value)

    def own(self) -> Iterator[tuple[list[str], Tensor]]:
        """Yield (all names, tensor) for each weight and buffer, without adapters. A tied weight is yielded
        only once, with all its names."""
        self.check_awake()
        groups: dict[Any, tuple[list[str], Tensor]] = {}
        for name, tensor in self.module.state_dict(keep_vars=True).items():
            if not (self.adapted and lora.is_adapter(name)):
                groups.setdefault(self.identity(tensor) or name, ([], tensor.detach()))[0].append(
                    lora.plain(name)
                )
        return iter(groups.values())

    def identity(self, tensor: Tensor) -> Any:
        """Return a key that is the same for all names of a tied weight, or None for an empty tensor."""
        return (tensor.data_ptr(), tensor.shape) if tensor.numel() else None

    def share(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Compute with ``tensors`` from now on, rather than this network's own weights of the same names.
        Tensors with a different dtype or device are ignored."""
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
        """Copy ``tensors`` into the weights of the same names, and reset adapters. Raises ValueError if a
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
        """Raise ValueError if the weights are offloaded. Computing with empty storages would crash the
        process."""
        if self.asleep:
            raise ValueError("found weights that are asleep, expected wake() before they are used")

    def held(self) -> Iterator[Tensor]:
        """Yield the tensors of the model and head that are in this process's memory."""
        for module in (self.module, self.head):
            yield from (*module.parameters(), *module.buffers()) if module is not None else ()

    def to(self, device: torch.device | str) -> None:
        """Move the model and head to a device."""
        self.module.to(device)
        if self.head is not None:
            self.head.to(device)

    def save(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder, including the value head."""
        merged = dict(self.tensors(precise=True)) if self.adapted else None
        self.write(folder, merged, self.head.state_dict() if self.kind == "values" else {})

    def write(self, folder: Path, tensors: dict[str, Tensor] | None, head: dict[str, Tensor]) -> None:
        """Write a model folder with the weights ``tensors``, or the model's own if None, and the value head
        ``head``.

        If adapters are merged into the weights, all weights are written in float32, the dtype in which a
        model without adapters is trained.
        """
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
    """Take the place of transformers' warning about padding. It isn't needed, because masks are passed
    wherever padding could be read."""


def load_network(spec: ModelSpec, settings: TrainerSettings | None = None) -> Network:
    """Load the model in ``spec.folder`` with the head that ``spec`` asks for. No code from the folder is run,
    and nothing is downloaded.

    A frozen model has the dtype ``spec.dtype``. A bfloat16 model that is trained keeps float32 weights and
    computes in bfloat16. If ``settings`` ask for adapters, a trained model gets them and its other weights
    are frozen. Raises PlanError if the folder doesn't contain such a model.
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


@contextlib.contextmanager
def _generation_as_it_is(module: Any, folder: Path) -> Iterator[None]:
    """Save a model inside a ``with`` block, with its generation config exactly as it was loaded.

    transformers would refuse to save some generation configs, such as one with top_k but without do_sample.
    """
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


def as_it_is(logits: Tensor) -> Tensor:
    """Return ``logits`` unchanged, for models that do nothing to them after the head."""
    return logits


def _candidates(config: Any) -> Iterator[Transform]:
    """Yield what a model may do to its logits according to its config: soft capping (Gemma), scaling (Cohere,
    Granite), or nothing."""
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
    """Raise PlanError if changing the last token changes earlier hidden states. In such a model, whatever
    follows the end of a row would change the row's numbers."""
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

    Known functions are tried on a few tokens until one reproduces the model's own logits. For this, the
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
        remedy="use another model: --model FOLDER",
    )
