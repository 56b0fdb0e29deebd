"""Prove that writing directly into an engine's memory gives the same bits as the engine's own reload.

A trace can't see tensors that an engine derives after loading, such as packed, quantised or absorbed weights.
So at the start of a run, the engine first loads a pattern of numbers itself. Then it loads a second pattern,
and the first one is written directly into its memory. If any parameter or buffer of a module now differs from
the first load, the engine will always load this module itself.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import networkx as nx
import torch
from torch import Tensor, nn

from rlflow.training.weight_sync.layout import Spread
from rlflow.training.weight_sync.shards import TensorViews, from_plain
from rlflow.training.weight_sync.trace import Traced

Reload = Callable[[Iterator[tuple[str, Tensor]]], None]


@dataclass(frozen=True, eq=False)
class Destinations:
    """The memory that a transfer writes to: the engine's own, or staged tensors that the engine then loads
    itself."""

    pieces: dict[str, TensorViews]  # tensor → views of the engine's memory
    staged: dict[str, Tensor]  # tensor → complete tensor that the engine then loads itself
    why: dict[str, str]  # module that the engine must load itself → reason
    device: torch.device = torch.device("cpu")

    def finish(self, reload: Reload) -> None:
        """Have the engine load the staged tensors with ``reload``. Call this after each run of the
        Resharder."""
        if self.staged:
            reload(iter(self.staged.items()))


def prove(
    model: nn.Module,
    traced: Traced,
    tensors: Mapping[str, Spread],
    reload: Reload,
    ties: Mapping[str, str] | None = None,
) -> Destinations:
    """Return destinations for all tensors, after testing direct writes bit for bit. This leaves test patterns
    in the model's weights.

    traced: what ``trace`` returned. reload: the engine's own loader, for all tensors or those of a few
    modules. ties: maps a name to another name of the same tensor in the trainer (``shards.ties_of``). Needs
    as much extra memory as the engine's weights take.
    """
    alike = together(traced.ties, ties or {})
    reload(patterns(tensors, 1, alike))
    expected = {name: tensor.detach().clone() for name, tensor in _state(model)}
    reload(patterns(tensors, 2, alike))
    for _ in range(2):  # also prove the fallback; the second pass should find no new difference
        places = destinations(traced, tensors)
        _write(places, tensors, alike, reload)
        if not (differing := _differing(model, expected)):
            return places
        for name in differing:
            traced.fallback.setdefault(
                name.rpartition(".")[0], f"{name} differs from the engine's own reload"
            )
        reload(patterns(tensors, 2, alike))
    places = destinations(traced, tensors)
    _write(places, tensors, alike, reload)
    if differing := _differing(model, expected):
        return _all_by_engine(places, tensors, differing)
    return places


def _all_by_engine(places: Destinations, tensors: Mapping[str, Spread], differing: list[str]) -> Destinations:
    """Return destinations for an engine that can't load single modules. All tensors are staged, and the
    engine loads the complete model."""
    why = places.why | {
        name.rpartition(".")[0]: f"{name} differs even if the engine loads its module" for name in differing
    }
    staged = _stage(tensors, places.device)
    return Destinations(
        {name: from_plain(tensor) for name, tensor in staged.items()}, staged, why, places.device
    )


def _stage(tensors: Mapping[str, Spread], device: torch.device) -> dict[str, Tensor]:
    return {
        name: torch.empty(spread.shape, dtype=getattr(torch, spread.dtype), device=device)
        for name, spread in tensors.items()
    }


def destinations(traced: Traced, tensors: Mapping[str, Spread]) -> Destinations:
    """Return the memory to write each tensor to: a view of the engine's memory if possible, or else a new
    tensor that the engine loads later."""
    by_engine = traced.loaded_by_engine()
    device = next(
        (piece.view.device for views in traced.pieces.values() for piece in views.pieces), torch.device("cpu")
    )
    staged = _stage({name: spread for name, spread in tensors.items() if name in by_engine}, device)
    straight = {name: pieces for name, pieces in traced.pieces.items() if name not in by_engine}
    return Destinations(
        straight | {name: from_plain(tensor) for name, tensor in staged.items()},
        staged,
        dict(traced.fallback),
        device,
    )


def _write(
    places: Destinations, tensors: Mapping[str, Spread], ties: Mapping[str, str], reload: Reload
) -> None:
    """Write the first test pattern to the destinations, the way a Resharder writes weights."""
    for name, values in patterns({name: tensors[name] for name in places.pieces}, 1, ties):
        for piece in places.pieces[name].pieces:
            piece.view.copy_(
                values[tuple(slice(low, high) for low, high in piece.box)] if piece.box else values
            )
    places.finish(reload)


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _differing(model: nn.Module, expected: Mapping[str, Tensor]) -> list[str]:
    """Return the names of parameters and buffers whose bits differ from ``expected``."""
    return [name for name, tensor in _state(model) if not _same(tensor.detach(), expected[name])]


def _same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(
        one.contiguous().reshape(-1).view(torch.uint8), other.contiguous().reshape(-1).view(torch.uint8)
    )


def together(*ties: Mapping[str, str]) -> dict[str, str]:
    """For each tensor with several names, map each of them to one common name. ``ties`` map one name to
    another name of the same tensor."""
    pairs = nx.Graph(pair for some in ties for pair in some.items())
    return {name: min(names) for names in nx.connected_components(pairs) for name in names}


def patterns(
    tensors: Mapping[str, Spread], salt: int, ties: Mapping[str, str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield a tensor of small integers for each name. The values depend on ``salt``, the tensor's name and
    the element's position. Tied tensors get the same values."""
    for name, spread in tensors.items():
        start = zlib.crc32(f"{salt} {ties.get(name, name)}".encode())
        index = torch.arange(spread.nbytes and torch.Size(spread.shape).numel())
        values = ((index * 2654435761 + start * 40503) >> 9) % 251 - 125
        yield name, values.to(getattr(torch, spread.dtype)).view(spread.shape)
