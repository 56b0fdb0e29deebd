"""Decide which rank sends which elements to which rank. Every missing byte comes from exactly one holder, in
buckets of limited size.

A piece is the overlap of a box that one rank needs and a box that one or more ranks hold. If the receiver
itself holds the piece, it copies it locally. Otherwise, it comes from a holder on the receiver's node, or
from another node if there is none. Among several candidates, the least loaded one sends. Elements are sent in
the narrower of the two dtypes.

Tensors with equal shapes and layouts are planned once, so planning time doesn't grow with a model's depth.
All ranks make the same plan, because it doesn't depend on timing, hashes or the calling rank.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from rlflow.errors import PlanError, listed, nearest
from rlflow.training.weight_sync.boxes import Box, overlap, volume
from rlflow.training.weight_sync.layout import Spread, WeightLayout, check_tiles, width
from rlflow.training.weight_sync.transfer_plan import (
    Bucket,
    Item,
    Moves,
    Numbers,
    Template,
    TransferPlan,
    by_rank,
)

BUCKET = 64 << 20  # bytes
SHARE = 4  # pieces or parts larger than 1 / SHARE of a bucket are divided, so that buckets fill well
SPLIT = 1 << 20  # bytes: pieces that several ranks could send are divided among them, down to this size
KEPT = 8  # maximum number of cached plans

_plans: OrderedDict[tuple[object, ...], TransferPlan] = OrderedDict()


def make_plan(
    source: WeightLayout, target: WeightLayout, node_of: Sequence[int] | None = None, bucket: int = BUCKET
) -> TransferPlan:
    """Plan how to move weights from the layout ``source`` to the layout ``target``. Recent plans are cached.

    node_of: the number of each rank's machine, or None if all ranks are on one machine. bucket: how many
    bytes a rank may send or receive at once. Raises PlanError if no rank holds a needed tensor, if a tensor's
    shape differs between the layouts, or if the shards of ``source`` don't cover a tensor exactly.
    """
    nodes = tuple(node_of) if node_of is not None else (0,) * source.ranks
    key = (source, target, nodes, bucket)
    if key not in _plans:
        _plans[key] = _new_plan(source, target, nodes, bucket)
        if len(_plans) > KEPT:
            _plans.popitem(last=False)
    _plans.move_to_end(key)
    return _plans[key]


def _new_plan(
    source: WeightLayout, target: WeightLayout, nodes: tuple[int, ...], bucket: int
) -> TransferPlan:
    _check_ranks(source, target, nodes)
    _check_bucket(bucket, target)
    groups: dict[tuple[object, ...], list[str]] = {}
    for name, wanted in target.tensors.items():
        have = _source(name, wanted, source)
        groups.setdefault((have.shape, wire(have.dtype, wanted.dtype), have.boxes, wanted.boxes), []).append(
            name
        )
    names: dict[str, tuple[int, str]] = {}
    templates: list[Template] = []
    load = np.zeros(source.ranks, np.int64)
    for index, alike in enumerate(groups.values()):
        have, wanted = source.tensors[alike[0]], target.tensors[alike[0]]
        dtype = wire(have.dtype, wanted.dtype)
        templates.append(
            _template(alike[0], have, wanted, np.array(nodes), bucket, width(dtype), len(alike), load)
        )
        load += sum(templates[-1].outbound, np.zeros_like(load)) * width(dtype) * len(alike)
        names |= dict.fromkeys(alike, (index, dtype))
    names = {name: names[name] for name in target.tensors}
    unused = tuple(name for name in source.tensors if name not in target.tensors)
    buckets = tuple(_buckets(names, templates, bucket))
    return TransferPlan(source.ranks, bucket, tuple(templates), names, buckets, source, target, unused)


def wire(source: str, wanted: str) -> str:
    """Return the dtype in which elements are sent: the narrower of the dtype held (``source``) and the dtype
    wanted. The receiver gets the same bits as if the held dtype were sent."""
    return source if width(source) < width(wanted) else wanted


def _check_ranks(source: WeightLayout, target: WeightLayout, nodes: tuple[int, ...]) -> None:
    if not source.ranks == target.ranks == len(nodes):
        raise PlanError.of(
            "reshard-ranks",
            "the layouts have different numbers of ranks",
            found=f"{source.ranks} ranks in the source, {target.ranks} in the target, nodes for {len(nodes)}",
            expected="all ranks of trainers and generators in each layout",
            remedy="add the missing ranks to each layout; a rank that holds or needs nothing has no boxes",
        )


def _check_bucket(bucket: int, target: WeightLayout) -> None:
    widest = max((width(spread.dtype) for spread in target.tensors.values()), default=1)
    if bucket < widest:
        raise PlanError.of(
            "reshard-bucket",
            "a bucket cannot hold one element",
            found=f"{bucket} bytes",
            expected=f"at least {widest}",
            remedy=f"leave it at {BUCKET >> 20} MiB",
        )


def _source(name: str, wanted: Spread, source: WeightLayout) -> Spread:
    have = source.tensors.get(name)
    if have is None:
        raise PlanError.of(
            "reshard-name",
            f"the generator needs tensor {name!r}, but no trainer holds it",
            found=listed(source.tensors),
            nearest=nearest(name, source.tensors),
            remedy="let the trainer report tied weights under each of their checkpoint names",
        )
    if have.shape != wanted.shape:
        raise PlanError.of(
            "reshard-shape",
            f"trainer and generator have different shapes for {name!r}",
            found=f"{list(wanted.shape)} in the generator",
            expected=f"{list(have.shape)} as in the trainer",
            remedy="give both the same model folder",
        )
    return have


# -- one shape and layout
# --------------------------------------------------------------------------------------------------------


def _template(
    name: str, have: Spread, wanted: Spread, node: Numbers, bucket: int, size: int, count: int, load: Numbers
) -> Template:
    """Return the moves for a group of tensors with equal layouts.

    name: any tensor in the group. count: how many tensors it has. size: bytes per element. load: [ranks], the
    bytes each rank already sends for other tensors.
    """
    check_tiles(name, have)
    ranks, holders = len(node), have.holders()
    holds = np.zeros((len(holders), ranks), bool)
    for i, owners in enumerate(holders.values()):
        holds[i, owners] = True
    box, receiver, boxes = _overlaps(_table(holders, len(have.shape)), *_needs(name, wanted))
    own = holds[box, receiver]
    local = Moves(receiver[own], receiver[own], boxes[own])
    moves = _sent(holds, box[~own], receiver[~own], boxes[~own], node, size, load // count)
    missing = by_rank(moves.receiver, moves.elements, ranks)
    parts = _parts(moves, bucket // size)
    outbound = tuple(by_rank(part.sender, part.elements, ranks) for part in parts)
    return Template(
        parts, local, missing, outbound, tuple(by_rank(part.receiver, part.elements, ranks) for part in parts)
    )


def _table(boxes: Iterable[Box], ndim: int) -> Numbers:
    boxes = list(boxes)
    return np.array(boxes, np.int64).reshape(len(boxes), ndim, 2)


def _needs(name: str, wanted: Spread) -> tuple[Numbers, Numbers]:
    """Return the receiver [N] and the box [N, ndim, 2] for each distinct box that a rank needs."""
    needs = [
        (rank, box) for rank, boxes in enumerate(wanted.boxes) for box in dict.fromkeys(boxes) if volume(box)
    ]
    for rank, boxes in enumerate(wanted.boxes):
        _check_apart(name, rank, list(dict.fromkeys(boxes)))
    return np.array([rank for rank, _ in needs], np.int64), _table(
        [box for _, box in needs], len(wanted.shape)
    )


def _check_apart(name: str, rank: int, boxes: list[Box]) -> None:
    clashes = [
        (one, other) for i, one in enumerate(boxes) for other in boxes[i + 1 :] if volume(overlap(one, other))
    ]
    if clashes:
        raise PlanError.of(
            "reshard-overlap",
            f"rank {rank} needs boxes of {name!r} that overlap",
            found=" and ".join(str(list(box)) for box in clashes[0]),
            expected="boxes that are equal or disjoint",
            remedy="let the engine itself reload the module of this parameter",
        )


def _overlaps(sources: Numbers, receiver: Numbers, needed: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """Return (index of the source box, receiver, overlap) wherever a source box and a needed box overlap,
    sorted by needed box and then by source box."""
    low = np.maximum(needed[:, None, :, 0], sources[None, :, :, 0])
    high = np.minimum(needed[:, None, :, 1], sources[None, :, :, 1])
    need, source = np.nonzero((low < high).all(axis=2))
    return source, receiver[need], np.stack([low[need, source], high[need, source]], axis=-1)


def _sent(
    holds: np.ndarray,
    box: Numbers,
    receiver: Numbers,
    boxes: Numbers,
    node: Numbers,
    size: int,
    load: Numbers,
) -> Moves:
    """Return the moves, with a sender for each piece. A piece held by only one rank is sent by that rank."""
    single = holds.sum(axis=1)[box] == 1
    moves = Moves(holds.argmax(axis=1)[box], receiver, boxes)
    if single.all():
        return moves
    sure = moves.take(np.nonzero(single)[0])
    load += by_rank(sure.sender, sure.elements, len(load)) * size
    chosen = _balanced(holds, box[~single], moves.take(np.nonzero(~single)[0]), node, size, load)
    return Moves(
        *(
            np.concatenate(columns)
            for columns in zip(
                (sure.sender, sure.receiver, sure.boxes),
                (chosen.sender, chosen.receiver, chosen.boxes),
                strict=True,
            )
        )
    )


def _balanced(
    holds: np.ndarray, box: Numbers, moves: Moves, node: Numbers, size: int, load: Numbers
) -> Moves:
    """Split large pieces among the ranks that could send them, and assign each piece to the least loaded
    candidate, or to the lowest rank in a tie."""
    near: dict[tuple[int, int], list[int]] = {}
    could = [
        _candidates(near, holds, int(i), int(where), node)
        for i, where in zip(box, node[moves.receiver], strict=True)
    ]
    counts = np.minimum([len(ranks) for ranks in could], np.maximum(moves.elements * size // SPLIT, 1))
    boxes, origin = cut(moves.boxes, counts)
    pieces = Moves(np.zeros(len(origin), np.int64), moves.receiver[origin], boxes)
    total = load.tolist()
    for k, (i, elements) in enumerate(zip(origin.tolist(), pieces.elements.tolist(), strict=True)):
        sender = min(could[i], key=total.__getitem__)
        total[sender] += elements * size
        pieces.sender[k] = sender
    return pieces


def _candidates(
    known: dict[tuple[int, int], list[int]], holds: np.ndarray, box: int, where: int, node: Numbers
) -> list[int]:
    """Return the ranks on the node ``where`` that hold the box or, if there are none, all ranks that hold it.
    ``known`` caches the results."""
    if (box, where) not in known:
        holders = np.nonzero(holds[box])[0]
        close = holders[node[holders] == where]
        known[box, where] = (close if len(close) else holders).tolist()
    return known[box, where]


# -- bounded pieces, parts and buckets
# -------------------------------------------------------------------------------------------


def cut(boxes: Numbers, counts: Numbers) -> tuple[Numbers, Numbers]:
    """Split each box into the number of pieces given in ``counts``. Returns the pieces, and the index of the
    box that each one comes from.

    A box is split along its first dimension or, if that has too few elements, along its longest one, into at
    most as many pieces as this dimension has elements.
    """
    if not boxes.shape[1]:
        return boxes, np.arange(len(boxes))
    sizes = boxes[:, :, 1] - boxes[:, :, 0]
    axis = np.where(sizes[:, 0] >= counts, 0, sizes.argmax(axis=1))
    counts = np.minimum(counts, sizes.max(axis=1))
    origin = np.repeat(np.arange(len(boxes)), counts)
    step = np.arange(len(origin)) - np.repeat(np.cumsum(counts) - counts, counts)
    row, axis, count = np.arange(len(origin)), axis[origin], counts[origin]
    pieces, low, length = boxes[origin].copy(), boxes[origin, axis, 0], sizes[origin, axis]
    pieces[row, axis, 0] = low + length * step // count
    pieces[row, axis, 1] = low + length * (step + 1) // count
    return pieces, origin


def _parts(moves: Moves, limit: int) -> tuple[Moves, ...]:
    """Split a tensor's moves into parts in which each rank sends and receives at most ``limit`` elements.

    If the moves are larger than a fraction of a bucket, pieces are split and interleaved so that each part
    loads all ranks evenly.
    """
    if not len(moves):
        return ()
    if _most(moves) <= max(limit // SHARE, 1):
        return (moves,)
    small, place = _small(moves, max(limit // (2 * SHARE), 1))
    # rotate: in each round, every rank sends to a different peer
    ring = (small.sender - small.receiver) % (1 + max(small.sender.max(), small.receiver.max()))
    order = np.lexsort((ring, place))
    return tuple(_windows(small.take(order), max(limit // SHARE, 1)))


def _most(moves: Moves) -> int:
    """Return the largest number of elements that any rank sends or receives."""
    return int(max(np.bincount(rank, moves.elements).max() for rank in (moves.sender, moves.receiver)))


def _small(moves: Moves, most: int) -> tuple[Moves, np.ndarray]:
    """Split pieces until each has at most ``most`` elements. Returns the pieces, and the relative position (0
    to 1) of each within the piece it comes from."""
    place, share = np.zeros(len(moves)), np.ones(len(moves))
    while (moves.elements > most).any():
        counts = np.minimum(
            -(-moves.elements // most), (moves.boxes[:, :, 1] - moves.boxes[:, :, 0]).max(axis=1)
        )
        boxes, origin = cut(moves.boxes, counts)
        step = np.arange(len(origin)) - (np.cumsum(counts) - counts)[origin]
        place, share = place[origin] + share[origin] * step / counts[origin], (share / counts)[origin]
        moves = Moves(moves.sender[origin], moves.receiver[origin], boxes)
    return moves, place


def _windows(moves: Moves, limit: int) -> Iterable[Moves]:
    """Yield groups of consecutive pieces, each as large as possible without any rank sending or receiving
    more than ``limit`` elements."""
    sides = [(rank, _running(rank, moves.elements)) for rank in (moves.sender, moves.receiver)]
    start = 0
    while start < len(moves):
        over = np.zeros(len(moves) - start, bool)
        for rank, running in sides:
            before = np.zeros(int(rank.max()) + 1, np.int64)
            np.maximum.at(before, rank[:start], running[:start])
            over |= running[start:] - before[rank[start:]] > limit
        stop = start + int(over.argmax()) if over.any() else len(moves)
        yield moves.take(np.arange(start, stop))
        start = stop


def _running(rank: Numbers, elements: Numbers) -> Numbers:
    """For each piece, return the number of elements in all of the same rank's pieces up to and including this
    one."""
    order = np.argsort(rank, kind="stable")
    total = np.cumsum(elements[order])
    first = np.searchsorted(rank[order], rank[order], side="left")
    running = np.empty_like(total)
    running[order] = total - (total - elements[order])[first]
    return running


def _buckets(
    names: Mapping[str, tuple[int, str]], templates: Sequence[Template], limit: int
) -> Iterable[Bucket]:
    """Yield buckets. A bucket has a single dtype, so that buffers are aligned. Within a dtype, tensors keep
    the order of the target layout."""
    for dtype in sorted({dtype for _, dtype in names.values()}, key=lambda dtype: (-width(dtype), dtype)):
        alike = [(name, index) for name, (index, dtype_of) in names.items() if dtype_of == dtype]
        items = [
            Item(name, index, part) for name, index in alike for part in range(len(templates[index].parts))
        ]
        yield from (Bucket(dtype, tuple(run)) for run in _runs(items, templates, limit // width(dtype)))


def _runs(items: Sequence[Item], templates: Sequence[Template], limit: int) -> Iterable[list[Item]]:
    """Yield lists of consecutive items, each as long as possible without any rank sending or receiving more
    than ``limit`` elements."""
    run: list[Item] = []
    total: Numbers = np.zeros(1, np.int64)
    for item in items:
        template = templates[item.template]
        more = np.concatenate([template.outbound[item.part], template.inbound[item.part]])
        if run and int((total + more).max()) > limit:
            yield run
            run, total = [], np.zeros(1, np.int64)
        run.append(item)
        total = total + more
    if run:
        yield run
