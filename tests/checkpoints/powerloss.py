"""A disk with exactly the guarantees of POSIX: after a power loss, any combination of unflushed changes may
be lost."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Node:
    """The bytes of a file or the entries of a folder, as programs see them now, and as they were at the last
    flush."""

    now: Any
    flushed: Any


def folder() -> Node:
    return Node({}, {})


State = dict[str, bytes | None]  # path → bytes, or None for a folder


@dataclass
class Disk:
    """Follows the calls of a writer below ``root``; ``states`` are the possible trees after a crash before
    the next call."""

    root: Path
    tree: Node = field(default_factory=folder)
    open_files: dict[int, Node] = field(default_factory=dict)

    @classmethod
    def of(cls, root: Path) -> Disk:
        """Existing files count as flushed."""
        disk = cls(root)
        for path in sorted(root.rglob("*")):
            parent, name = disk.at(path.parent), path.name
            parent.now[name] = parent.flushed[name] = (
                folder() if path.is_dir() else Node(path.read_bytes(), path.read_bytes())
            )
        return disk

    def at(self, path: Any, inside: int | None = None) -> Node:
        node = self.tree if inside is None else self.open_files[inside]
        parts = Path(path).parts if inside is not None else Path(path).relative_to(self.root).parts
        for part in parts:
            node = node.now[part]
        return node

    def parent(self, path: Any, inside: int | None = None) -> tuple[Node, str]:
        path = Path(path)
        return (self.at(path.parent, inside) if inside is None else self.open_files[inside]), path.name

    def after(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        inside = kwargs.get("dir_fd")
        if name == "open":
            self._open(args, inside, result)
        elif name == "write" and args[0] in self.open_files:
            self.open_files[args[0]].now += bytes(args[1][:result])
        elif name == "fsync" and args[0] in self.open_files:
            node = self.open_files[args[0]]
            node.flushed = dict(node.now) if isinstance(node.now, dict) else node.now
        elif name == "dup":
            self._duplicate(args[0], result)
        elif name == "ftruncate" and args[0] in self.open_files:
            self.open_files[args[0]].now = self.open_files[args[0]].now[: args[1]]
        elif name == "mkdir":
            where, last = self.parent(args[0])
            where.now[last] = folder()
        elif name in ("rename", "replace"):
            (source, old), (target, new) = self.parent(args[0]), self.parent(args[1])
            target.now[new] = source.now.pop(old)
        elif name in ("unlink", "rmdir"):
            where, last = self.parent(args[0], inside)
            del where.now[last]

    def _duplicate(self, file: int, other: int) -> None:
        self.open_files.pop(other, None)
        if file in self.open_files:
            self.open_files[other] = self.open_files[file]

    def _open(self, args: tuple[Any, ...], inside: int | None, result: int) -> None:
        if inside is None and not Path(args[0]).is_relative_to(self.root):
            self.open_files.pop(result, None)
            return
        where, last = self.parent(args[0], inside) if Path(args[0]) != self.root else (self.tree, "")
        if args[1] & os.O_CREAT:
            where.now.setdefault(last, Node(b"", b""))
        # written by other means, and not flushed yet
        elif last and last not in where.now and Path(args[0]).is_file():
            where.now[last] = Node(Path(args[0]).read_bytes(), b"")
        self.open_files[result] = where.now[last] if last else self.tree

    def states(self, chance: random.Random, mixed: int = 3) -> Iterator[State]:
        yield self._tree(self.tree, lambda: False, lambda: False)  # no unflushed change
        yield self._tree(self.tree, lambda: True, lambda: False)  # names were written before data
        yield self._tree(self.tree, lambda: False, lambda: True)
        for _ in range(mixed):
            yield self._tree(self.tree, lambda: chance.random() < 0.5, lambda: chance.random() < 0.5)

    def _tree(self, node: Node, names: Any, data: Any, prefix: str = "") -> State:
        out: State = {}
        for name, child in (node.now if names() else node.flushed).items():
            if isinstance(child.now, dict):
                out |= {prefix + name: None} | self._tree(child, names, data, f"{prefix}{name}/")
            else:
                zeros = bytes(max(len(child.now) - len(child.flushed), 0))  # it may have been truncated since
                out[prefix + name] = child.now if data() else child.flushed + zeros
        return out


def write(state: State, where: Path) -> Path:
    for path, data in state.items():
        if data is None:
            (where / path).mkdir(parents=True)
        else:
            (where / path).write_bytes(data)
    return where
