"""Fix the rotary frequencies of models for which transformers chooses them by the longest row of a batch
(longrope, dynamic).

Otherwise, a row's numbers would depend on the other rows of its batch, and cached keys would keep old
frequencies while later keys get new ones.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rlflow.backends.local.room import longest as room_of
from rlflow.errors import PlanError
from rlflow.training import pretrained
from rlflow.training.pretrained import Boundary

FIXED = "default"  # the rope type whose frequencies transformers never changes
MSCALES = ("short_mscale", "long_mscale")  # factors that Phi-3.5-MoE applies to all rotations of a batch


@torch.no_grad()
def hold(module: Any, tokens: int) -> int | None:
    """Fix a model's rotary frequencies, in place, to those that transformers chooses for rows of ``tokens``
    tokens. With 0, the model's number of positions is used.

    Returns the length in tokens of the longest row for which these frequencies are right, or None if there's
    no limit. Raises PlanError if the frequencies still change with the longest row.
    """
    reaches = []
    for layer, kind, boundary in _following(module):
        longest = tokens or room_of(layer.config) or boundary.tokens + 1
        _call(layer, kind, [longest - 1])  # transformers chooses
        _fix(layer, kind, longest > boundary.tokens)
        _check_fixed(layer, kind, max(longest, boundary.tokens))
        reaches.append(boundary.reach(longest))
    return min((reach for reach in reaches if reach is not None), default=None)


def _following(module: nn.Module) -> Iterator[tuple[Any, str | None, Boundary]]:
    """Yield (layer, kind of attention layer, boundary) for each rotary layer that depends on the longest
    row."""
    for layer in module.modules():
        if hasattr(layer, "rope_type") and hasattr(layer, "config"):
            for kind, boundary in pretrained.length_boundaries(layer.config).items():
                yield layer, kind, boundary


def _rope(config: Any, kind: str | None) -> dict[str, Any]:
    parameters: dict[str, Any] = config.rope_parameters
    return parameters if kind is None else parameters[kind]


def _call(layer: Any, kind: str | None, positions: list[int]) -> Tensor:
    """Return what a rotary layer computes for these positions, such as cosines, [..., positions, width]."""
    of_kind = {} if kind is None else {"layer_type": kind}
    turned = layer(torch.zeros(1), torch.tensor([positions]), **of_kind)
    return turned[0] if isinstance(turned, tuple) else turned


def _fix(layer: Any, kind: str | None, long: bool) -> None:
    """Make transformers keep the current frequencies for this kind of layer. ``long`` says whether they are
    those for long rows."""
    if kind is None:
        layer.rope_type = FIXED
    else:
        layer.rope_type = {**layer.rope_type, kind: FIXED}
    rope = _rope(layer.config, kind)
    if all(name in rope for name in MSCALES):
        # change a copy: the model's own config is written to the folders that it is saved to
        layer.config = copy.deepcopy(layer.config)
        _rope(layer.config, kind).update(dict.fromkeys(MSCALES, rope[MSCALES[long]]))


def _check_fixed(layer: Any, kind: str | None, far: int) -> None:
    alone, with_longer = _call(layer, kind, [0, 1]), _call(layer, kind, [0, 1, far])
    if not torch.allclose(alone, with_longer[..., :2, :]):
        raise PlanError.of(
            "rotary",
            f"{type(layer).__name__} chooses rotations by the longest row of a batch, in an unknown way",
            found=f"rope type {_rope(layer.config, kind).get('rope_type')}",
            expected="rope type longrope or dynamic of transformers",
            remedy="use another model: --model FOLDER",
        )
