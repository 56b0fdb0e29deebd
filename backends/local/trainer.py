"""The local trainer, which runs forward passes and AdamW on one device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlflow.author import torch_private
from rlflow.author.batch import Batch, Data, pad, ramp
from rlflow.author.columns import Kind, Level
from rlflow.author.loss import Loss, Quantity
from rlflow.backends.local import lora
from rlflow.backends.local.compiled import check_compiler, compile_layers
from rlflow.backends.local.embeddings import add_by_rows
from rlflow.backends.local.forward_cache import CachedForward
from rlflow.backends.local.heap import HEAP
from rlflow.backends.local.logprobs import logprobs_and_entropy, tokens_at_once
from rlflow.backends.local.lora import digest, is_adapter
from rlflow.backends.local.network import Network, as_it_is, load_network
from rlflow.backends.local.offload import OffloadedParts
from rlflow.backends.local.packing import packed
from rlflow.backends.local.passes import can_pack, hidden_states
from rlflow.backends.local.read_model import checkpoint_layers
from rlflow.backends.local.sequences import Sequences, longest_row, sequences
from rlflow.backends.local.settings import TrainerSettings
from rlflow.backends.local.tokenizer import copy_tokenizer
from rlflow.errors import PlanError, listed
from rlflow.training.learning import Learned, OptimizerStep, Passes, RankShare, learn, learn_shares
from rlflow.training.loss_rows import token_counts
from rlflow.training.metrics import MERGE_ROUNDING
from rlflow.training.minibatches import microbatches
from rlflow.training.objective import Means, New
from rlflow.training.peers import Peers
from rlflow.training.prefixes import packed_microbatches
from rlflow.training.protocols import Capabilities, ModelSpec
from rlflow.training.schedule import Schedule
from rlflow.training.weight_sync.shards import TensorViews, pieces_of

# rows that an idle rank runs while others have micro-batches
ONE_TOKEN = Batch.of(prompt_tokens=[[0]], tokens=[[0]])
QUANTITIES = {"logprobs": ("logprobs", "entropy"), "values": ("values",), "scores": ("scores",)}


def stored(name: str) -> str:
    """Return a trained parameter's key in the trainer's state: ``adapters/NAME`` for an adapter,
    ``parameters/NAME`` otherwise."""
    return f"adapters/{name}" if is_adapter(name) else f"parameters/{name}"


# name in a trainer's state of the steps before the optimizer was last reset, if it ever was
STEPS_BEFORE_RESET = "steps_before_reset"


class Trainer:
    """A model with its head and, if it is trained, its optimizer."""

    Settings = TrainerSettings

    def __init__(self, spec: ModelSpec, settings: TrainerSettings | None = None) -> None:
        self.spec, self.settings = spec, settings or TrainerSettings()
        self.peers = Peers(spec.group)
        if self.settings.compile:
            check_compiler(torch.device(spec.device).type)  # raise before reading the weights
        self.network = self._network()
        self.packs = self.can.packs and can_pack(self.network)
        self.base: Tensor | None = None  # digest of the adapters' base, once computed
        own = self.settings
        self.schedule = (
            Schedule(own.lr, own.schedule, own.warmup, spec.updates) if spec.trained else Schedule(own.lr)
        )
        self.steps = 0
        self.steps_before_reset = 0  # steps taken before the optimizer was last reset
        self.cached = CachedForward()
        self.offloaded = OffloadedParts()
        self.optimizer = self._optimizer() if spec.trained else None
        if spec.trained and self.settings.gradient_checkpointing:
            checkpoint_layers(self.network.module)
        if self.settings.compile:
            compile_layers(self.network, packs=self.packs)

    @classmethod
    def capabilities(cls, settings: TrainerSettings, device: str) -> Capabilities:
        """Return the trainer's capabilities. The ranks of a subclass can't be threads."""
        return Capabilities(
            threads=cls is Trainer,
            movable=("weights", "optimizer"),
            passing=("gradient",),
            live=True,
            divided=(),
            adapters=settings.lora > 0,
            packs=settings.packed and device == "cpu",  # docs/gpu.md has the gain on a GPU
        )

    @property
    def can(self) -> Capabilities:
        """The capabilities of this trainer, given its settings and device."""
        return self.capabilities(self.settings, self.spec.device)

    def _network(self) -> Network:
        network = load_network(self.spec, self.settings)
        if self.can.live:
            add_by_rows(network)
        return network

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.network.device

    @torch.no_grad()
    def forward(self, batch: Batch, want: tuple[str, ...] | None = None, *, ahead: bool = False) -> Batch:
        """Run a forward pass and return the columns in ``want`` on the batch's axis. By default, this is the
        first quantity of the model's head.

        Reads prompt_tokens, tokens and, if present, temperature. In token columns, entry t belongs to
        tokens[:, t]; scores are computed at the last token. Other rows affect a row's numbers only through
        rounding in matrix products.
        """
        want = want or QUANTITIES[self.spec.head][:1]
        batch = batch.select("prompt_tokens", "tokens", *(["temperature"] if "temperature" in batch else []))
        lengths = batch.data["tokens"].lengths
        starts = lengths.cumsum(0) - lengths
        out: dict[str, Tensor] = {}
        micros = self._micros(batch)
        idle = self.peers.idle(len(micros), self.device)
        for micro in micros:
            place = starts[micro].repeat_interleave(lengths[micro]) + ramp(lengths[micro])
            for name, flat in self._forward(
                batch.rows(micro), want, ahead and len(micro) == len(batch)
            ).items():
                out.setdefault(
                    name,
                    torch.zeros(len(batch) if name == "scores" else int(lengths.sum()), dtype=flat.dtype),
                )
                out[name][micro if name == "scores" else place] = flat.cpu()
        for _ in range(idle):
            self._compute(ONE_TOKEN, want)
        return Batch(
            batch.axis, {name: self._column(name, out.get(name, torch.zeros(0)), lengths) for name in want}
        )

    def forward_ahead(self, batch: Batch, want: tuple[str, ...] | None = None) -> Batch:
        """Run ``forward``. If the batch is a single micro-batch, its autograd graph is kept until the weights
        change, and an update that begins with the same rows reuses it."""
        return self.forward(batch, want, ahead=self.optimizer is not None)

    def update(
        self,
        batch: Batch,
        loss: Loss,
        *,
        epochs: int = 1,
        minibatch: int | None = None,
        mean: Means = "tokens",
        seed: int = 0,
        **settings: Any,
    ) -> dict[str, float]:
        """Minimise ``loss`` and return metrics. See ``rlflow.training.learning`` for the order of rows, the
        averaging and the metrics."""
        if self.optimizer is None:
            raise ValueError("update: found a frozen model, expected one with ModelSpec(trained=True)")
        passes = Passes(epochs, minibatch, mean, seed, self.settings.micro_tokens, self._cut)
        learned = {"lr": self.schedule.rate(self.steps)} | learn(self, batch, loss, settings, passes)
        self._check_finite()
        return learned | self._rounding()

    def resize_passes(self, tokens: int) -> int:
        """Limit each pass to this many tokens from now on, and return the previous limit."""
        before = self.settings.micro_tokens
        self.settings = replace(self.settings, micro_tokens=tokens)
        return before

    def reset_optimizer(self) -> None:
        """Clear the optimizer's moments, and count its steps from 0 again. The learning rate's schedule
        continues."""
        self._check_optimizer()
        self.steps_before_reset = self.steps
        self._clear_moments()

    def _clear_moments(self) -> None:
        if self.optimizer is not None:
            self.optimizer.state.clear()

    def update_shares(
        self, batch: Batch, loss: Loss, shares: Sequence[RankShare], mean: Means, settings: Mapping[str, Any]
    ) -> Learned:
        """Do one rank's part of an update (``rlflow.training.learning.learn_shares``)."""
        learned = learn_shares(self, batch, loss, settings, Passes(mean=mean, cut=self._cut), shares)
        self._check_finite()
        return replace(learned, steps={**learned.steps, **self._rounding()})

    def _rounding(self) -> dict[str, float]:
        """Return the metric that measures how much of what adapters have learned is lost when they are merged
        for generators (``lora.rounding``), or {} without adapters."""
        return {MERGE_ROUNDING: lora.rounding(self._merging(), self._whole)} if self.network.adapted else {}

    def _merging(self) -> Iterator[tuple[Any, Tensor]]:
        return self.network.merging()

    def _whole(self, tensor: Tensor) -> Tensor:
        return self.network.whole(tensor)

    def _check_finite(self) -> None:
        """Raise FloatingPointError if an optimizer step left NaN or infinities in parameters, which must
        never be saved."""
        held = [(name, part) for name, part in self._learning() if part.numel()]
        sizes = (
            torch.stack(list(torch_private.largest_of_each([part for _, part in held])))
            if held
            else torch.zeros(0)
        )
        if bad := [
            name for (name, _), size in zip(held, sizes.tolist(), strict=True) if not math.isfinite(size)
        ]:
            rate = self.schedule.rate(max(self.steps - 1, 0))
            raise FloatingPointError(
                f"after the optimizer's steps {len(bad)} of {len(held)} parameters have NaN or infinities, "
                f"such as {listed(bad, 3)}. Nothing of this update is saved. The gradients were finite, so "
                f"the learning rate ({rate:g}) is too large. Use a smaller --lr; rlflow resume RUN "
                "--fork --lr RATE continues from the newest checkpoint, if there is one"
            )

    def _learning(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each trained parameter's name and this rank's part of it."""
        return ((name, parameter.detach()) for name, parameter in self.network.parameters().items())

    def compute(self, rows: Batch, want: tuple[Quantity, ...]) -> New:
        """Run a forward pass and return the quantities in ``want``, attached to the autograd graph. Token
        quantities are padded to the shape of ``rows["tokens"]``."""
        lengths = rows.data["tokens"].lengths
        flat = self.cached.take(rows, want) or self._compute(rows, want)
        return New(**{name: x if name == "scores" else pad(x, lengths) for name, x in flat.items()})

    def backward(self, objective: Tensor) -> None:
        """Backpropagate a scalar objective, adding to the weights' gradients."""
        objective.backward()

    def idle(self, want: tuple[Quantity, ...]) -> None:
        """Join in a micro-batch of other ranks without adding a gradient. Ranks with sharded weights need
        this."""
        self.backward(sum(x.sum() for x in self._compute(ONE_TOKEN, want).values()) * 0.0)

    def step(self) -> OptimizerStep:
        """Take an optimizer step: sum the gradients over all ranks, clip, change the weights, and clear the
        gradient. If the gradient isn't finite, the weights stay as they are."""
        self._check_optimizer()
        norm = self._clip(list(self.network.parameters().values()))
        lr, finite = self.schedule.rate(self.steps), norm < torch.inf
        if finite:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            self.steps += 1
        self.optimizer.zero_grad()
        self.cached.drop()
        HEAP.step_ended()
        return OptimizerStep(finite, norm, lr)

    def _clip(self, learning: list[torch.nn.Parameter]) -> float:
        """Sum the gradients over all ranks and clip the sum. Returns its norm before clipping."""
        self.peers.add_gradients(learning)
        return float(torch.nn.utils.clip_grad_norm_(learning, self.settings.max_grad_norm))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the model's weights with their Hugging Face names. A tied weight is yielded only once.

        Without adapters, these are views of the trained tensors, not copies.
        """
        return self.network.tensors()

    def masters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the live weights, including a value head, in the precision in which they are kept.

        Layers with adapters are merged into new tensors. A tied weight is yielded only once.
        """
        return self.network.masters()

    def pieces(self) -> dict[str, TensorViews] | None:
        """Return views of this rank's parts of ``weights``, by tensor name, without gathering anything.

        Returns None if there are adapters, because ``weights`` then merges them into new tensors.
        """
        return (
            None
            if self.network.adapted
            else pieces_of((names[0], tensor) for names, tensor in self.network.own())
        )

    def save(self, folder: Path) -> None:
        """Write a Hugging Face folder with the config, the weights as safetensors, the tokenizer of the
        source folder, and a critic's value head. Weights are written in the dtype in which they are
        trained."""
        folder.mkdir(parents=True, exist_ok=True)
        self.network.save(folder)
        copy_tokenizer(self.spec.folder, folder)
        self._save_adapter(folder)

    def _save_adapter(self, folder: Path) -> None:
        """Write the adapters to the subfolder ``adapter``. If the weights are split across ranks, every rank
        must call this."""
        names = [
            name
            for name in self.network.parameters()
            if self.network.adapted and not name.startswith("value_head.")
        ]
        whole = {
            name: self._whole(parameter)
            for name, parameter in self.network.parameters().items()
            if name in names
        }
        if whole and self.first:
            lora.save_adapter(self.network.module, self.settings, whole, self.spec.folder, folder / "adapter")

    @property
    def first(self) -> bool:
        """True on the rank that writes files."""
        return True

    def load(self, folder: Path) -> None:
        """Load weights from a folder written by ``save``. The optimizer stays as it is."""
        other = load_network(ModelSpec(folder, self.spec.head, self.spec.trained, "cpu", self.spec.dtype))
        self.network.copy(other.tensors())
        self.base = None
        self.cached.drop()
        for name, value in other.head.state_dict().items() if self.spec.head == "values" else ():
            self.network.put(self.network.head.state_dict()[name], value)

    def state(self) -> dict[str, Tensor]:
        """Return everything needed to continue bit for bit, by name: ``parameters/NAME``, ``exp_avg/NAME``,
        ``exp_avg_sq/NAME`` and ``steps``.

        With adapters, ``parameters/`` holds the merged weights in host memory, ``adapters/NAME`` the
        adapters, and ``base/sha256`` the digest of the weights that they belong to. The tensors are live, so
        copy them if you need them after the next update.
        """
        return dict(self._state())

    def _state(self) -> Iterator[tuple[str, Tensor]]:
        self._check_optimizer()
        for name, tensor in self.network.tensors(precise=True):
            yield f"parameters/{name}", tensor.cpu() if self.network.adapted else tensor
        yield from self._counts()
        if self.network.adapted:
            yield "base/sha256", self._base_digest()
        for name, parameter in self.network.parameters().items():
            if name.startswith("value_head.") or is_adapter(name):
                yield stored(name), self.network.whole(parameter.detach())
            for moment in ("exp_avg", "exp_avg_sq") if self.optimizer else ():
                if moment in self.optimizer.state[parameter]:
                    yield f"{moment}/{name}", self.network.whole(self.optimizer.state[parameter][moment])

    def _counts(self) -> Iterator[tuple[str, Tensor]]:
        yield "steps", torch.tensor(self.steps)
        if self.steps_before_reset:
            yield STEPS_BEFORE_RESET, torch.tensor(self.steps_before_reset)

    def _restore_counts(self, state: Mapping[str, Tensor]) -> float:
        """Restore the counts of steps. Returns the steps since the optimizer was last reset."""
        self.steps = int(state["steps"])
        self.steps_before_reset = int(state.get(STEPS_BEFORE_RESET, 0))
        return float(self.steps - self.steps_before_reset)

    def restore(self, state: dict[str, Tensor]) -> None:
        """Restore a state returned by ``state``. Raises PlanError if its adapters, or the base weights they
        belong to, differ from this model's."""
        self._check_optimizer()
        if self.network.adapted:
            self._check_adapters(state)
        else:
            own = {
                name.removeprefix("parameters/"): t
                for name, t in state.items()
                if name.startswith("parameters/")
            }
            self.network.copy((name, t) for name, t in own.items() if not name.startswith("value_head."))
        taken = self._restore_counts(state)
        self.cached.drop()
        self._clear_moments()
        for name, parameter in self.network.parameters().items():
            if self.network.adapted or name.startswith("value_head."):
                self.network.put(parameter.detach(), state[stored(name)])
            if self.optimizer is not None and f"exp_avg/{name}" in state:
                moments = {
                    moment: torch.empty_like(parameter, requires_grad=False)
                    for moment in ("exp_avg", "exp_avg_sq")
                }
                for moment, tensor in moments.items():
                    self.network.put(tensor, state[f"{moment}/{name}"])
                step = torch.tensor(taken, device=parameter.device if self.device.type == "cuda" else "cpu")
                self.optimizer.state[parameter] = moments | {"step": step}

    def _base_digest(self) -> Tensor:
        if self.base is None:
            self.base = digest(self.network.module, self.network.whole)
        return self.base

    def _check_adapters(self, state: dict[str, Tensor]) -> None:
        """Raise PlanError if the adapters in ``state`` have different names or shapes than this model's, or
        belong to different base weights."""
        saved = {name: list(t.shape) for name, t in state.items() if name.startswith("adapters/")}
        own = {
            stored(name): self._shape(p) for name, p in self.network.parameters().items() if is_adapter(name)
        }
        if saved != own:
            first = next(name for name in {**own, **saved} if saved.get(name) != own.get(name))
            raise PlanError.of(
                "lora-adapters",
                "the adapters in the checkpoint do not match the adapters of this run",
                found=f"{len(saved)} adapter weights, {first}: {saved.get(first)}",
                expected=f"{len(own)}, {own.get(first)}",
                remedy="keep --lora and --lora-targets, or export the run and start from that folder",
            )
        if not torch.equal(state["base/sha256"].cpu(), self._base_digest()):
            raise PlanError.of(
                "lora-base",
                f"the weights in {self.spec.folder} are not the base of the checkpoint's adapters",
                found="a different sha256",
                expected="the folder and dtype that the run began with",
                remedy="restore the folder; rlflow export does not need it",
            )

    def _shape(self, parameter: Tensor) -> list[int]:
        return list(parameter.shape)

    def sleep(self, *parts: str) -> None:
        """Offload these parts, or all ``movable`` ones if none are given.

        Parts on a GPU move to host memory, and parts in host memory move to a file
        (``backends/local/offload.py``). An offloaded part can't be used before ``wake``, but its tensor
        objects stay valid. Raises OSError if there isn't enough space.
        """
        for part in parts or self.can.movable:
            if part == "weights":
                self.cached.drop()
            self.offloaded.put(part, self._tensors(part))
            self.network.asleep = "weights" in self.offloaded

    def wake(self, *parts: str) -> None:
        """Restore these offloaded parts bit for bit, or all of them if none are given."""
        for part in parts or self.can.movable:
            self.offloaded.back(part)
            self.network.asleep = "weights" in self.offloaded

    def _tensors(self, part: str) -> Iterator[Tensor]:
        """Yield the tensors of a part (weights or optimizer) that are in this process's memory."""
        if part == "weights":
            yield from self.network.held()
        elif self.optimizer is not None:
            yield from (
                tensor for state in self.optimizer.state.values() for tensor in state.values() if tensor.dim()
            )

    def _check_optimizer(self) -> None:
        if "optimizer" in self.offloaded:
            raise ValueError("found optimizer state that is asleep, expected wake() before it is used")

    def _optimizer(self) -> torch.optim.AdamW:
        learning = list(self.network.parameters().values())
        matrices = [p for p in learning if p.dim() >= 2]
        rest = [p for p in learning if p.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": self.settings.weight_decay},
            {"params": rest, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(
            [g for g in groups if g["params"]],
            lr=self.settings.lr,
            eps=self.settings.eps,
            betas=(self.settings.beta1, self.settings.beta2),
            fused=True,
        )

    def _micros(self, batch: Batch) -> list[Tensor]:
        units = list(torch.arange(len(batch)).split(1)) if len(batch) else []
        return [torch.cat(micro) for micro in self._cut(batch, units)]

    def _cut(self, batch: Batch, units: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """Split units (tensors of row indices that must stay together) into micro-batches, and yield the
        units of each."""
        tokens = self.settings.micro_tokens
        return (
            packed_microbatches(batch, units, tokens=tokens)
            if self.packs
            else microbatches(units, token_counts(batch), tokens=tokens)
        )

    def _forward(self, rows: Batch, want: tuple[str, ...], ahead: bool) -> dict[str, Tensor]:
        if ahead and self.device.type == "cpu":
            # sampling has fragmented the memory: without this, the graph would be allocated in addition to it
            HEAP.give_back()
        with torch.set_grad_enabled(ahead):
            flat = self._compute(rows, want)
        if ahead:
            self.cached.keep(rows, flat)
        return {name: x.detach() for name, x in flat.items()}

    def _compute(self, rows: Batch, want: tuple[str, ...]) -> dict[str, Tensor]:
        """Run a forward pass and return the quantities in ``want`` on the device: per-token quantities as a
        flat tensor [entries], scores as [rows]."""
        unknown = [name for name in want if name not in QUANTITIES[self.spec.head]]
        if unknown:
            raise ValueError(
                f"asked for {unknown[0]!r}, but this model's head gives {', '.join(QUANTITIES[self.spec.head])}"
            )
        self.network.check_row(longest_row(rows))
        layout = packed(rows, self.device) if self.packs else sequences(rows, self.device)
        hidden = hidden_states(self.network, layout)
        if self.spec.head == "logprobs":
            return self._logprobs(rows, layout, hidden[layout.before], "entropy" in want, want)
        places = layout.last if self.spec.head == "scores" else layout.before
        return {self.spec.head: self.network.numbers(hidden[places])}

    def _logprobs(
        self, rows: Batch, layout: Sequences, hidden: Tensor, entropy: bool, want: tuple[str, ...]
    ) -> dict[str, Tensor]:
        each = (
            rows["temperature"] if "temperature" in rows and bool((rows["temperature"] != 1).any()) else None
        )
        temperature = None if each is None else each.repeat_interleave(layout.lengths).to(hidden.device)
        tokens = tokens_at_once(self.settings.logit_tokens, self.network.vocabulary)
        both = logprobs_and_entropy(
            self.network.logits,
            hidden,
            layout.targets,
            temperature,
            tokens=tokens,
            entropy=entropy,
            once=self.network.transform is as_it_is,
        )
        return {name: x for name, x in zip(("logprobs", "entropy"), both, strict=True) if name in want}

    def _column(self, name: str, value: Tensor, lengths: Tensor) -> Data:
        dtype = str(value.dtype).removeprefix("torch.")
        return (
            Data(Kind(Level.ROW, dtype), value)
            if name == "scores"
            else Data(Kind(Level.TOKEN, dtype), value, lengths)
        )
