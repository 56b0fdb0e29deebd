"""Find where an engine stores each weight by recording the copies that its own ``load_weights`` makes.

The engine loads meta tensors, which have a shape but no memory. Views of a meta tensor keep its storage,
offset and strides, so the final copy, which isn't carried out, shows how the loader has narrowed, transposed
or split the tensor. No table of architectures is needed, and fused, replicated and padded parameters aren't
special cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rlflow.author import torch_private
from rlflow.errors import PlanError, listed
from rlflow.training.weight_sync.boxes import overlap, volume
from rlflow.training.weight_sync.layout import Spread
from rlflow.training.weight_sync.shards import ShardView, TensorViews, dtype_name
from rlflow.training.weight_sync.strides import StridedAxis, Untraceable, places

Load = Callable[[Iterable[tuple[str, Tensor]]], Any]


@dataclass
class Traced:
    """The copies that a weight loader makes: which tensors go to which memory of the engine."""

    # Hugging Face tensor → the engine's memory that it is copied to
    pieces: dict[str, TensorViews] = field(default_factory=dict)
    # tensor → the engine's modules that use it
    modules: dict[str, set[str]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)  # tensor that could not be traced → reason
    # module that only the engine itself can load → reason
    fallback: dict[str, str] = field(default_factory=dict)
    #: tensor → another tensor copied later to the same place; both have the same values in any checkpoint
    ties: dict[str, str] = field(default_factory=dict)

    def loaded_by_engine(self) -> set[str]:
        """Return the tensors that the engine must load itself: those that couldn't be traced, and all tensors
        of the modules in ``fallback`` and of any modules that share a tensor with these."""
        names, modules = set(self.failed), set(self.fallback)
        while more := {name for name, used in self.modules.items() if name not in names and (used & modules)}:
            names |= more
            modules |= {module for name in names for module in self.modules.get(name, ())}
        return names


def trace(model: nn.Module, tensors: Mapping[str, Spread], load: Load | None = None) -> Traced:
    """Return where this rank's engine stores each of the trainers' tensors, without writing to the model's
    memory.

    tensors: shape and dtype by Hugging Face name. load: a loader to use instead of the model's
    ``load_weights``. Raises PlanError if a parameter of the engine doesn't get any weight.
    """
    load = load or model.load_weights  # type: ignore[assignment]
    memory = {name: parameter.data for name, parameter in model.named_parameters()}
    traced = Traced()
    while True:
        recorder = _Recorder(model, tensors)
        problem = _attempt(
            load, recorder, {name: spread for name, spread in tensors.items() if name not in traced.failed}
        )
        _restore(model, memory)
        if problem is None:
            break
        traced.failed |= problem
    traced.failed |= recorder.failed
    traced.ties = recorder.ties
    _fill(traced, recorder, tensors)
    _check_reached(model, traced, recorder)
    return traced


def _attempt(load: Load | None, recorder: _Recorder, tensors: Mapping[str, Spread]) -> dict[str, str] | None:
    """Run the loader once. Returns None if it succeeds, or {tensor: error} if it fails at a tensor."""
    assert load is not None
    try:
        with torch.no_grad(), recorder:
            load(recorder.metas(tensors))
    except Exception as error:  # a loader may fail in any way on a tensor without memory
        if recorder.current is None:
            raise
        return {
            recorder.current: f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        }
    return None


def _restore(model: nn.Module, memory: Mapping[str, Tensor]) -> None:
    """Give parameters their memory back if a loader has replaced it with tensors that have none."""
    for name, parameter in model.named_parameters():
        if name in memory and parameter.data.data_ptr() != memory[name].data_ptr():
            parameter.data = memory[name]


class _Recorder(torch_private.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records each copy from a meta tensor into the model's memory, instead of carrying it out."""

    def __init__(self, model: nn.Module, tensors: Mapping[str, Spread]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors, self.current = tensors, None
        self.names: dict[int, str] = {}
        self.references: list[Tensor] = []
        self.failed: dict[str, str] = {}
        self.ties: dict[str, str] = {}
        self.copies: dict[tuple[Any, ...], tuple[str, ShardView, str]] = {}
        self.parameters: dict[int, list[tuple[str, Tensor]]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.parameters.setdefault(parameter.untyped_storage().data_ptr(), []).append((name, parameter))

    current: str | None

    def metas(self, tensors: Mapping[str, Spread]) -> Iterator[tuple[str, Tensor]]:
        for name, spread in tensors.items():
            meta = torch.empty(spread.shape, dtype=getattr(torch, spread.dtype), device="meta")
            self.references.append(meta)
            self.names[torch_private.storage_key(meta)] = name
            self.current = name
            yield name, meta

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            func is torch.ops.aten.copy_.default
            and args[1].device.type == "meta"
            and args[0].device.type != "meta"
        ):
            self._record(args[0], args[1])
            return args[0]
        return func(*args, **(kwargs or {}))

    def _record(self, into: Tensor, out_of: Tensor) -> None:
        name = self.names.get(torch_private.storage_key(out_of))
        if name is None:
            self.failed[str(self.current)] = "the loader computes with it"
            return
        engine = self._parameter(into)
        if engine is None:
            self.failed[name] = "the loader copies it to memory that is not a parameter"
            return
        view = out_of.expand(into.shape)
        start, end = int(view.storage_offset()), int(into.storage_offset())
        axes = [StridedAxis(*axis) for axis in zip(into.shape, view.stride(), into.stride(), strict=True)]
        try:
            for place in places(self.tensors[name].shape, start, axes, end) if into.numel() else ():
                sizes = tuple(high - low for low, high in place.box)
                key = (into.untyped_storage().data_ptr(), place.offset, sizes, place.strides)
                piece = ShardView(place.box, into.detach().as_strided(sizes, place.strides, place.offset))
                if key in self.copies and self.copies[key][0] != name:
                    self.ties[self.copies[key][0]] = name
                self.copies[key] = (name, piece, engine)  # a later copy replaces an earlier one
        except Untraceable as problem:
            self.failed[name] = str(problem)

    def _parameter(self, into: Tensor) -> str | None:
        """Return the name of the model's parameter whose memory contains ``into``, or None if there is
        none."""
        for name, parameter in self.parameters.get(into.untyped_storage().data_ptr(), ()):
            end = parameter.storage_offset() + sum(
                (n - 1) * s for n, s in zip(parameter.shape, parameter.stride(), strict=True)
            )
            if parameter.numel() and parameter.storage_offset() <= into.storage_offset() <= end:
                return name
        return None


def _fill(traced: Traced, recorder: _Recorder, tensors: Mapping[str, Spread]) -> None:
    views: dict[str, list[ShardView]] = {}
    for name, piece, engine in recorder.copies.values():
        views.setdefault(name, []).append(piece)
        traced.modules.setdefault(name, set()).add(engine.rpartition(".")[0])
    for name, pieces in views.items():
        dtypes = {dtype_name(piece.view) for piece in pieces}
        if len(dtypes) > 1 or _cross(pieces):
            traced.failed[name] = "its copies overlap partly, or have several dtypes"
        traced.pieces[name] = TensorViews(tensors[name].shape, min(dtypes), tuple(pieces))
    for name in traced.failed:
        for module in traced.modules.get(name, ()):
            traced.fallback[module] = f"{name}: {traced.failed[name]}"
        traced.pieces.pop(name, None)


def _cross(pieces: list[ShardView]) -> bool:
    boxes = list(dict.fromkeys(piece.box for piece in pieces))
    return any(volume(overlap(one, other)) for i, one in enumerate(boxes) for other in boxes[i + 1 :])


def _check_reached(model: nn.Module, traced: Traced, recorder: _Recorder) -> None:
    """Raise PlanError if a parameter of the engine doesn't get any weight. If a trace has failed, such
    parameters may belong to it, so their modules are added to ``fallback`` instead."""
    storages = {key[0] for key in recorder.copies}
    missed = []
    for name, parameter in model.named_parameters():
        if not parameter.numel():
            traced.fallback[name.rpartition(".")[0]] = f"{name} has no memory: the engine keeps it packed"
        elif parameter.untyped_storage().data_ptr() not in storages:
            missed.append(name)
    if missed and not traced.failed:
        raise PlanError.of(
            "reshard-unreached",
            f"the engine's parameter {missed[0]!r} gets no weight of the trainer",
            found=listed(missed),
            expected=f"a copy from one of {len(recorder.tensors)} tensors",
            remedy="train and sample the same model",
        )
    for name in missed:
        traced.fallback[name.rpartition(".")[0]] = "; ".join(
            f"{tensor}: {why}" for tensor, why in traced.failed.items()
        )
