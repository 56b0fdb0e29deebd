"""Attention over packed rows (packing.py). Each row attends to its own tokens and to the tokens that its
family shares, which are stored only once.

transformers creates a mask for each kind of layer and passes it to the layer's attention. Inside ``over``,
this "mask" is a ``PackedMask``, which describes the tokens to attend to. This works for every model that uses
torch's ``scaled_dot_product_attention`` with masks from transformers, be they causal, with sliding windows,
or in chunks.

Attention to the shared tokens and to a row's own tokens is computed separately. The two results are then
merged using the logarithms of their softmax sums (Milakov and Gimelshein 2018; Dao et al. 2022), also in the
backward pass. The keys and values of shared tokens are therefore never copied per row.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rlflow.author import torch_private
from rlflow.author.scope import with_value
from rlflow.backends.local.branches import StepMask, attend_step
from rlflow.backends.local.packing import Block, Run
from rlflow.backends.local.positions import Visible, by_positions
from rlflow.backends.local.transformers_internals import ALL_ATTENTION_FUNCTIONS

_FORWARD, _BACKWARD = torch_private.flash_for_cpu()
_PACKED: ContextVar[tuple[Block, ...] | None] = ContextVar("packed", default=None)


class PackedMask:
    """The mask of packed rows: which tokens of ``blocks`` each token attends to.

    visible: the model's own mask function, which says which earlier tokens of its row a token sees, or None
    if it sees them all.
    """

    def __init__(self, blocks: tuple[Block, ...], visible: Visible | None) -> None:
        self.blocks, self.visible = blocks, visible
        self._masks: dict[tuple[Any, ...], Tensor] = {}

    def common(self, block: Block, like: Tensor) -> Tensor | None:
        """Return the additive mask among a block's common tokens, [shared, shared], or None for a causal
        mask."""
        return self._between("common", block.shared, like, lambda: (torch.arange(block.shared),) * 2)

    def own(self, block: Block, run: Run, like: Tensor) -> Tensor | None:
        """Return the additive mask among the own tokens of a row in a run, [length, length], or None for a
        causal mask."""
        places = torch.arange(block.shared, block.shared + run.length)
        return self._between(
            ("own", block.shared, run.length), block.shared + run.length, like, lambda: (places, places)
        )

    def back(self, block: Block, like: Tensor) -> Tensor | None:
        """Return the additive mask from the own tokens of a block's rows to its common tokens, [tokens,
        shared], or None if all common tokens are visible."""
        return self._between(
            ("back", block), block.longest, like, lambda: (_positions(block), torch.arange(block.shared))
        )

    def _between(
        self, what: Any, longest: int, like: Tensor, places: Callable[[], tuple[Tensor, Tensor]]
    ) -> Tensor | None:
        if self.visible is None:
            return None
        key = (what, longest, like.dtype)
        if key not in self._masks:
            query, keys = (place.to(like.device) for place in places())
            visible = self.visible(0, 0, query[:, None], keys[None])
            self._masks[key] = like.new_zeros(visible.shape).masked_fill(
                ~visible, torch.finfo(like.dtype).min / 2
            )
        return self._masks[key]


def _positions(block: Block) -> Tensor:
    """Return each token's position in its row, for the tokens of a block after the common ones."""
    return torch.cat(
        [torch.arange(block.shared, block.shared + run.length).repeat(run.count) for run in block.runs]
    )


def over(blocks: tuple[Block, ...]) -> contextlib.AbstractContextManager[None]:
    """Let models process the packed rows described by ``blocks`` inside a ``with`` block."""
    return with_value(_PACKED, blocks)


def mask_of_packed(local_size: int | None, visible: Visible, use_vmap: bool) -> PackedMask | None:
    """Return the mask for the packed rows of the current ``over`` block, or None outside of one. Raises
    ValueError if the model's mask depends on anything besides token positions."""
    blocks = _PACKED.get()
    if blocks is None:
        return None
    return PackedMask(
        blocks,
        by_positions(visible, local_size, max((block.longest for block in blocks), default=0), use_vmap),
    )


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """Stand in for the attention function of transformers, which handles all but three cases: packed rows,
    decode steps of branched rows, and grouped-query attention with a mask during inference on a CPU, where
    keys needn't be copied."""
    if isinstance(attention_mask, PackedMask):
        return attend(query, key, value, attention_mask, **options), None
    if isinstance(attention_mask, StepMask):
        return attend_step(query, key, value, attention_mask, options.get("scaling")), None
    if (
        attention_mask is not None
        and query.device.type == "cpu"
        and key.shape[1] < query.shape[1]
        and torch.is_inference_mode_enabled()
    ):
        scaling, dropout = options.get("scaling"), options.get("dropout", 0.0)
        out = scaled_dot_product_attention(
            query, key, value, attention_mask, dropout, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2).contiguous(), None
    return _PLAIN(module, query, key, value, attention_mask, **options)


@contextlib.contextmanager
def without_cudnn(device: torch.device) -> Iterator[None]:
    """Keep attention on a GPU from using cuDNN inside a ``with`` block. Meant for decode steps.

    PyTorch would choose cuDNN for padded rows, but 3 of 20 identical cuDNN calls differed in the last bits of
    their results, so identical runs sampled different tokens (H100, PyTorch 2.11, bfloat16). Training should
    use cuDNN, since its gradients are reproducible and those of PyTorch's flash attention aren't.
    """
    if device.type != "cuda":
        yield
        return
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


_PLAIN = ALL_ATTENTION_FUNCTIONS["sdpa"]
ALL_ATTENTION_FUNCTIONS["sdpa"] = _attention


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: PackedMask,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Compute the attention of packed rows, [1, tokens, heads, size].

    query: [1, heads, tokens, size]. key, value: [1, key heads, tokens, size]. Raises ValueError for options
    that packed rows don't support.
    """
    if dropout or is_causal is False or position_bias is not None:
        raise ValueError(
            "found dropout, a bias or no causal mask, expected plain causal attention over packed rows"
        )
    if query.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(query.device.type):
        query, key, value = (x.to(torch.get_autocast_dtype(query.device.type)) for x in (query, key, value))
    if query.device.type == "cpu" and value.shape[-1] == query.shape[-1]:
        return _Attention.apply(query, key, value, mask, scaling).transpose(1, 2)
    return by_copies(query, key, value, mask, scaling)


def by_copies(query: Tensor, key: Tensor, value: Tensor, mask: PackedMask, scaling: float | None) -> Tensor:
    """Compute the attention of packed rows by copying the common keys and values for each row. Used if
    torch's kernel doesn't return the logarithms of its softmax sums."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    out = []
    for block in mask.blocks:
        common = [x[:, :, block.start : block.start + block.shared] for x in (query, key, value)]
        if block.shared:
            visible = mask.common(block, query)
            attended = scaled_dot_product_attention(
                *common, attn_mask=visible, is_causal=visible is None, scale=scaling
            )
            out.append(attended[0].transpose(0, 1))
        for run in block.runs:
            own = [_rows(x, run) for x in (query, key, value)]
            both = [
                torch.cat([c.expand(run.count, -1, -1, -1), x], 2)
                for c, x in zip(common[1:], own[1:], strict=True)
            ]
            visible = mask.own(block, run, query)
            back = mask.back(block, query)
            row = _causal(run.length, query) if visible is None else visible
            first = run.start - block.rows.start
            before = (
                row.new_zeros(run.length, block.shared) if back is None else back[first : first + run.length]
            )
            attended = scaled_dot_product_attention(
                own[0], *both, attn_mask=torch.cat([before, row], 1), scale=scaling
            )
            out.append(attended.transpose(1, 2).flatten(0, 1))
    return torch.cat(out)[None]


def _causal(length: int, like: Tensor) -> Tensor:
    return torch.full(
        (length, length), torch.finfo(like.dtype).min / 2, dtype=like.dtype, device=like.device
    ).triu(1)


def _rows(x: Tensor, run: Run) -> Tensor:
    """View the rows of a run in ``x`` [1, heads, tokens, size] as [rows, heads, length, size]."""
    return x[0, :, run.start : run.end].unflatten(1, (run.count, run.length)).transpose(0, 1)


class _Attention(torch.autograd.Function):
    """Attention of packed rows that saves only its inputs and outputs for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: PackedMask, scaling: float | None
    ) -> Tensor:
        out = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
        sums = torch.empty_like(query[..., 0], dtype=torch.promote_types(query.dtype, torch.float32))
        for block in mask.blocks:
            for part, visible in _parts(mask, block, query):
                attended = _FORWARD(
                    part(query),
                    part(key),
                    part(value),
                    0.0,
                    visible is None,
                    attn_mask=visible,
                    scale=scaling,
                )
                part(out).copy_(attended[0])
                part(sums).copy_(attended[1])
            if block.shared:
                rows, common = block.rows, slice(block.start, block.start + block.shared)
                attended = _FORWARD(
                    query[:, :, rows],
                    key[:, :, common],
                    value[:, :, common],
                    0.0,
                    False,
                    attn_mask=mask.back(block, query),
                    scale=scaling,
                )
                _join(out[:, :, rows], sums[:, :, rows], *attended)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.mask, ctx.scaling = mask, scaling
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, out, sums = ctx.saved_tensors
        totals = [torch.empty_like(x) for x in (query, key, value)]
        for block in ctx.mask.blocks:
            for part, visible in _parts(ctx.mask, block, query):
                own = _BACKWARD(
                    *map(part, (gradient, query, key, value, out, sums)),
                    0.0,
                    visible is None,
                    attn_mask=visible,
                    scale=ctx.scaling,
                )
                for total, new in zip(totals, own, strict=True):
                    part(total).copy_(new)
            if block.shared:
                rows, common = block.rows, slice(block.start, block.start + block.shared)
                back = _BACKWARD(
                    gradient[:, :, rows],
                    query[:, :, rows],
                    key[:, :, common],
                    value[:, :, common],
                    out[:, :, rows],
                    sums[:, :, rows],
                    0.0,
                    False,
                    attn_mask=ctx.mask.back(block, query),
                    scale=ctx.scaling,
                )
                for total, new, where in zip(totals, back, (rows, common, common), strict=True):
                    total[:, :, where] += new
        return (*totals, None, None)


def _parts(
    mask: PackedMask, block: Block, like: Tensor
) -> Iterator[tuple[Callable[[Tensor], Tensor], Tensor | None]]:
    """Yield (function, mask) for each part of a block that attends to itself: first the common tokens, then
    the rows of each run.

    The function takes a tensor [1, heads, tokens, …] and returns a view of the part's tokens.
    """
    if block.shared:
        yield lambda x: x[:, :, block.start : block.start + block.shared], mask.common(block, like)
    for run in block.runs:
        yield functools.partial(_rows, run=run), mask.own(block, run, like)


def _join(out: Tensor, sums: Tensor, other: Tensor, other_sums: Tensor) -> None:
    """Merge two attention results for the same queries but different keys, writing into ``out`` and ``sums``.

    out, other: [1, heads, tokens, size]. sums, other_sums: the logarithms of their softmax sums, [1, heads,
    tokens].
    """
    total = torch.logaddexp(sums, other_sums)
    out.copy_(out * (sums - total).exp()[..., None] + other * (other_sums - total).exp()[..., None])
    sums.copy_(total)
