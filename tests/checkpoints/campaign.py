"""Several hundred corruptions of a run's checkpoints, and the outcome of reading each. Used by the tests and
by a benchmark."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch

from rlflow.checkpoints.manifest import decode
from rlflow.checkpoints.reading import load_latest
from rlflow.checkpoints.snapshot import Snapshot
from rlflow.checkpoints.writer import Writer
from rlflow.errors import PlanError

OLDER, NEWER = 11, 12


def example(iteration: int, rows: int = 12) -> Snapshot:
    """Return a small snapshot whose files all differ from those of other iterations."""
    chance = torch.Generator().manual_seed(iteration)
    draw = lambda *shape: torch.randn(*shape, generator=chance)  # noqa: E731
    parameters = {
        "model.embed.weight": draw(rows, 8),
        "model.norm.weight": draw(8).bfloat16(),
        "lm_head.weight": draw(rows, 8),
    }
    optimizer = {f"exp_avg/{name}": draw(*tensor.shape) for name, tensor in parameters.items()} | {
        "steps": torch.tensor(iteration)
    }
    surplus = {
        "tokens": torch.randint(0, 99, (5, 7), generator=chance),
        "empty": torch.empty(0, 3, dtype=torch.float64),
    }
    tensors = {"actor.parameters": parameters, "actor.optimizer": optimizer, "surplus": surplus}
    state = {
        "cursor": iteration * 64,
        "seed": 2**100 + iteration,
        "kl": 0.1 * iteration,
        "worst": float("-inf"),
    }
    return Snapshot(iteration, tensors, state, {"actor/config.json": json.dumps({"n": iteration}).encode()})


def same(one: Snapshot, other: Snapshot) -> bool:
    """Return True if both are equal bit for bit, in the same order."""
    flat = [
        [(g, n, str(t.dtype), list(t.shape), bits(t)) for g, ts in s.tensors.items() for n, t in ts.items()]
        for s in (one, other)
    ]
    return flat[0] == flat[1] and (one.iteration, repr(one.state), one.files) == (
        other.iteration,
        repr(other.state),
        other.files,
    )


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def write_run(run: Path, iterations: tuple[int, ...] = (OLDER, NEWER), keep: int = 2) -> Path:
    """Write a run with these checkpoints, the parameters in two shards."""
    run.mkdir(parents=True, exist_ok=True)
    with Writer(run, keep=keep, shard_bytes=500) as writer:
        for iteration in iterations:
            writer.submit(example(iteration))
    assert not writer.failures, writer.failures
    return run


@dataclass(frozen=True)
class Corruption:
    """A corruption of a run. apply: corrupts it in place. leaves: the iterations that may be loaded
    afterwards; empty if everything is damaged."""

    kind: str
    name: str
    apply: Callable[[Path], None]
    leaves: tuple[int, ...] = (OLDER,)


def corruptions(run: Path) -> Iterator[Corruption]:
    """Return all corruptions for a run made by ``write_run``."""
    where = run / "checkpoints"
    newer, older = where / f"step-{NEWER:08d}", where / f"step-{OLDER:08d}"
    files = sorted(path.relative_to(newer).as_posix() for path in newer.rglob("*") if path.is_file())
    for name in files:
        data, place = (newer / name).read_bytes(), f"checkpoints/{newer.name}/{name}"
        yield from _damaged(place, data, (OLDER,))
        yield Corruption("missing", name, lambda r, p=place: (r / p).unlink())
        yield Corruption("link", name, lambda r, p=place: _linked(r / p))
        yield Corruption("folder", name, lambda r, p=place: _as_folder(r / p))
        yield Corruption(
            "swapped",
            f"{name} with the older one's",
            lambda r, n=name: _swap(r, newer.name, n, older.name, n),
        )
    for one, other in zip(files, files[1:] + files[:1], strict=True):
        yield Corruption(
            "swapped", f"{one} with {other}", lambda r, a=one, b=other: _swap(r, newer.name, a, newer.name, b)
        )
    yield from _strangers(newer.name)
    yield from _forged(newer / "manifest.json", f"checkpoints/{newer.name}/manifest.json")
    yield from _folders(newer.name, older.name)
    yield from _pointer((where / "latest").read_bytes())
    yield from _both(newer.name, older.name, files)


def _damaged(place: str, data: bytes, leaves: tuple[int, ...], kinds: str = "") -> Iterator[Corruption]:
    """Cut, flip, zero and extend a file at its edges and in between."""
    size = len(data)
    header = 8 + int.from_bytes(data[:8], "little") if place.endswith(".safetensors") else 12
    edges = {
        0,
        1,
        7,
        8,
        9,
        header // 2,
        header - 1,
        header,
        header + 1,
        size // 4,
        size // 2,
        3 * size // 4,
        size - 1,
    }
    seen = {data}
    for offset in sorted(edge for edge in edges if 0 <= edge < size):
        yield Corruption(kinds + "truncated", f"{place} to {offset}", _put(place, data[:offset]), leaves)
        zeroed = data[:offset] + bytes(size - offset)
        if zeroed not in seen:  # zeroing zeros changes nothing
            yield Corruption(kinds + "zero tail", f"{place} from {offset}", _put(place, zeroed), leaves)
        seen.add(zeroed)
    positions = sorted({*range(min(8, size)), *(size * step // 24 for step in range(24)), size - 1})
    for number, offset in enumerate(positions):
        flipped = bytearray(data)
        flipped[offset] ^= 1 << number % 8
        yield Corruption(kinds + "bit flipped", f"{place} at {offset}", _put(place, bytes(flipped)), leaves)
    for more in (b"\0", b"\n", bytes(4096)):
        yield Corruption(
            kinds + "grown", f"{place} by {more[:1]!r} * {len(more)}", _put(place, data + more), leaves
        )


def _put(place: str, data: bytes) -> Callable[[Path], None]:
    return lambda run: (run / place).write_bytes(data) and None


def _linked(path: Path) -> None:
    """Replace a file by a link to the same content outside the run."""
    outside = path.parents[3 if path.parent.name == "actor" else 2] / "outside"
    shutil.move(path, outside)
    path.symlink_to(outside)


def _as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _swap(run: Path, one_step: str, one: str, other_step: str, other: str) -> None:
    first, second = run / "checkpoints" / one_step / one, run / "checkpoints" / other_step / other
    data = first.read_bytes(), second.read_bytes()
    first.write_bytes(data[1])
    if one_step == other_step:  # the older checkpoint stays good, as the one to fall back to
        second.write_bytes(data[0])


def _strangers(step: str) -> Iterator[Corruption]:
    """Files that do not belong to a checkpoint are reported and not read."""
    place, newest = f"checkpoints/{step}", (NEWER,)
    yield Corruption("stranger", "a file", _put(f"{place}/extra.safetensors", b"x"), newest)
    yield Corruption("stranger", "a hidden file", _put(f"{place}/.DS_Store", b"\0"), newest)
    yield Corruption("stranger", "a file inside", _put(f"{place}/actor/extra.json", b"{}"), newest)
    yield Corruption("stranger", "a folder", lambda run: (run / place / "extra").mkdir(), newest)
    yield Corruption(
        "stranger", "a link", lambda run: (run / place / "extra").symlink_to("manifest.json"), newest
    )
    yield Corruption("stranger", "a pipe", lambda run: os.mkfifo(run / place / "extra"), newest)
    yield Corruption(
        "link", "the folder inside", lambda run: _linked_folder(run / place / "actor", run / "outside")
    )
    yield Corruption("link", "the checkpoint", lambda run: _linked_folder(run / place, run / "outside"))


def _linked_folder(path: Path, outside: Path) -> None:
    shutil.move(path, outside)
    path.symlink_to(outside, target_is_directory=True)


def signed(body: bytes) -> bytes:
    """Return a manifest of this body with its correct digest."""
    return b'{"sha256": "' + sha256(body).hexdigest().encode() + b'",\n"manifest": ' + body + b"}\n"


def _forged(manifest: Path, place: str) -> Iterator[Corruption]:
    """Manifests with a correct digest of their own, but not the written one. The pointer shows the
    difference."""
    data = manifest.read_bytes()
    content = json.loads(data)["manifest"]
    first = next(iter(content["files"]))
    forgeries = {
        "version": {"version": 2},
        "version as text": {"version": "1"},
        "format": {"format": "other"},
        "iteration": {"iteration": OLDER},
        "negative": {"iteration": -1},
        "state": {"state": {}},
        "no files": {"files": {}},
        "no groups": {"groups": {}},
        "extra": {"more": 1},
        "size": {"files": content["files"] | {first: content["files"][first] | {"bytes": 1}}},
        "digest": {"files": content["files"] | {first: content["files"][first] | {"sha256": "0" * 64}}},
    }
    for name, change in forgeries.items():
        yield Corruption("forged", name, _put(place, signed(json.dumps(content | change).encode())))
    for name, body in {
        "list": b"[]",
        "deep": b"[" * 99999,
        "number": b"NaN",
        "twice": b'{"a":1,"a":2}',
        "none": b"",
    }.items():
        yield Corruption("forged", name, _put(place, signed(body)))
    assert decode(data).iteration == NEWER


def _folders(newer: str, older: str) -> Iterator[Corruption]:
    def exchanged(run: Path) -> None:
        where = run / "checkpoints"
        (where / newer).rename(where / "aside")
        (where / older).rename(where / newer)
        (where / "aside").rename(where / older)

    yield Corruption("swapped", "the checkpoints' folders", exchanged, ())
    yield Corruption("missing", "the checkpoint", lambda run: shutil.rmtree(run / "checkpoints" / newer))
    yield Corruption("folder", "the checkpoint is a file", lambda run: _as_file(run / "checkpoints" / newer))


def _as_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_bytes(b"")


def _pointer(data: bytes) -> Iterator[Corruption]:
    either = (NEWER, OLDER)
    yield from _damaged("checkpoints/latest", data, either, "pointer ")
    yield Corruption("pointer missing", "latest", lambda run: (run / "checkpoints/latest").unlink(), either)
    yield Corruption("pointer folder", "latest", lambda run: _as_folder(run / "checkpoints/latest"), either)
    yield Corruption("pointer link", "latest", lambda run: _linked(run / "checkpoints/latest"), either)
    for name in (
        "../outside",
        "/etc/passwd",
        "step-00000012/../step-00000011",
        "step-00000099",
        ".",
        "step-00000012\0",
    ):
        text = f"{name} {'0' * 64}"
        forged = f"{text} {sha256(text.encode()).hexdigest()[:16]}\n".encode()
        yield Corruption("pointer forged", repr(name), _put("checkpoints/latest", forged), either)


def _both(newer: str, older: str, files: list[str]) -> Iterator[Corruption]:
    """If the older checkpoint is damaged too, nothing may be loaded."""
    for name in files:

        def both(run: Path, name: str = name) -> None:
            for step in (newer, older):
                path = run / "checkpoints" / step / name
                path.write_bytes(path.read_bytes()[:-1])

        yield Corruption("all damaged", name, both, ())


def outcome(run: Path, corruption: Corruption, scratch: Path) -> str:
    """Return the outcome of reading a corrupted copy of the run: 'previous' or 'newest' (both reported),
    'refused', or the error."""
    copy = scratch / "copy"
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(run, copy)
    corruption.apply(copy)
    try:
        loaded = load_latest(copy)
    except PlanError as error:
        return "refused" if not corruption.leaves and len(error.problems) > 1 else f"wrong: refused: {error}"
    if not loaded.rejected and not loaded.ignored:
        return "wrong: silent"
    if loaded.snapshot.iteration not in corruption.leaves or not same(
        loaded.snapshot, example(loaded.snapshot.iteration)
    ):
        return f"wrong: loaded {loaded.snapshot.iteration}"
    return "previous" if loaded.snapshot.iteration == OLDER else "newest"
