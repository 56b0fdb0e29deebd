"""Graphs as versioned msgpack bytes, strictly validated when read. Also the identity of a graph."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgpack

from rlflow.author.node_options import (
    FILL,
    AskOptions,
    ChooseOptions,
    ConcatOptions,
    DrawOptions,
    EncodeOptions,
    FollowOptions,
    GenerateOptions,
    NodeOptions,
    ReadOptions,
    RepeatOptions,
    ShownOptions,
    UpdateOptions,
    WriteOptions,
)
from rlflow.compiler.graph.model import Column, Graph, Node, Op
from rlflow.errors import PlanError

VERSION = 1
OPTIONS: dict[str, type[NodeOptions]] = {
    Op.STAGE: ShownOptions,
    Op.GENERATE: GenerateOptions,
    Op.UPDATE: UpdateOptions,
    Op.REPEAT: RepeatOptions,
    Op.ASK: AskOptions,
    Op.ENCODE: EncodeOptions,
    Op.CHOOSE: ChooseOptions,
    Op.READ: ReadOptions,
    Op.WRITE: WriteOptions,
    Op.DRAW: DrawOptions,
    Op.CONCAT: ConcatOptions,
    Op.FOLLOW: FollowOptions,
}
LATER = {"step": "sampled", "parts": ()}  # fields of an axis that are omitted at these values


def pack(graph: Graph) -> bytes:
    """Encode a graph as msgpack bytes. ``unpack`` decodes them."""
    return bytes(msgpack.packb({"format": "rlflow-graph", "version": VERSION, "graph": _plain(graph)}))


def _plain(graph: Graph) -> dict[str, Any]:
    """Return the graph as plain values.

    Fields added in later versions are left out if they have their default, so that older graphs keep their
    identity.
    """
    fields = graph.as_fields()
    _shortened(fields)
    return fields


def _shortened(graph: dict[str, Any]) -> None:
    if graph["evaluation"] is None:
        del graph["evaluation"]
    else:
        _shortened(graph["evaluation"])
    for axis in graph["axes"]:
        for name in ("step", "parts"):
            if axis[name] == LATER[name]:
                del axis[name]
    for node in graph["nodes"]:
        # the settings of an update already have its ``after``
        if node["schedule"]["every"] == 1 and (node["op"] == Op.UPDATE or not node["schedule"]["after"]):
            del node["schedule"]
        if node["body"] is not None:
            _shortened(node["body"])


def unpack(data: bytes) -> Graph:
    """Decode a graph that ``pack`` encoded.

    Raises PlanError if the bytes have another version, are damaged, or have unknown or missing fields.
    """
    from pydantic import ValidationError

    try:
        envelope = msgpack.unpackb(data)
        if envelope["format"] != "rlflow-graph" or envelope["version"] != VERSION:
            raise ValueError(f"format {envelope['format']!r} version {envelope['version']!r}")
        _read_settings(envelope["graph"])
        graph: Graph = _adapter(Graph).validate_json(json.dumps(envelope["graph"]), strict=True)
        _consistent(graph)
        return graph
    except (
        ValueError,
        LookupError,
        TypeError,
        SyntaxError,
        OverflowError,
        RecursionError,
        msgpack.UnpackException,
        ValidationError,
    ) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise PlanError.of(
            "graph-bytes",
            "these bytes are not a graph of this version",
            found=reason,
            expected=f"rlflow-graph version {VERSION}",
            remedy="write the graph again with this version",
        ) from error


def _read_settings(graph: dict[str, Any]) -> None:
    """Convert each call's settings, in place, from pairs of name and value to the fields of their class.

    Settings that don't fit their class stay pairs, for example because a secret is masked.
    """
    from pydantic import ValidationError

    for node in graph["nodes"]:
        kind: Any = OPTIONS.get(node["op"], NodeOptions)
        pairs = node["settings"]
        if node["op"] == Op.UPDATE and [name for name, _ in pairs[3:4]] == ["after"]:
            node["schedule"] = {"every": 1, **node.get("schedule", {}), "after": pairs[3][1]}
            pairs = [*pairs[:3], *pairs[4:]]
        fields = _own_fields(kind, pairs)
        try:
            _adapter(kind).validate_json(json.dumps(fields), strict=True)
        except ValidationError:
            fields = {"own": pairs}
        node["settings"] = fields
        if node["body"] is not None:
            _read_settings(node["body"])
    if graph.get("evaluation") is not None:
        _read_settings(graph["evaluation"])


def _own_fields(kind: type[NodeOptions], pairs: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Convert settings from pairs to fields of the class ``kind``."""
    if kind is ShownOptions:
        return {"own": pairs}
    if kind is UpdateOptions:
        count = 6 if [name for name, _ in pairs[3:6]] == ["scale", "where", "losses"] else 3
        return {**_own_fields(NodeOptions, pairs[:count]), "own": pairs[count:]}
    if kind is ConcatOptions:
        fill = [[name.removeprefix(FILL), value] for name, value in pairs if name.startswith(FILL)]
        return {"groups": next((value for name, value in pairs if name == "groups"), None), "fill": fill}
    return {name: value if name == "environment" else _typed(value) for name, value in pairs}


def _typed(value: Any) -> Any:
    """Parse the value of a setting. Tuples and long integers are stored as text."""
    return (
        ast.literal_eval(value)
        if isinstance(value, str) and (value.startswith("(") or value.isdigit())
        else value
    )


def _consistent(graph: Graph) -> None:
    """Raise ValueError if a reference leads nowhere, or to a later node."""
    available: set[Column] = set()
    for number, node in enumerate(graph.nodes):
        if node.id != number or not {item.column for item in node.inputs} <= available:
            raise ValueError(f"node {node.name!r} reads a column that no earlier node gives")
        if not all(0 <= axis < len(graph.axes) for axis in (node.axis, node.rows_axis)):
            raise ValueError(f"node {node.name!r} has rows on an axis that the graph does not have")
        available |= {Column(number, output.name) for output in node.outputs}
        if node.body is not None:
            _consistent(node.body)
    if len(graph.by_name) != len(graph.nodes):
        raise ValueError("two nodes have the same name")
    for number, axis in enumerate(graph.axes):
        if not all(
            0 <= origin < number for origin in (*axis.parts, *(() if axis.parent is None else (axis.parent,)))
        ):
            raise ValueError("rows refer to an axis that the graph does not have")
    if graph.axes and not 0 <= graph.rows < len(graph.axes):
        raise ValueError("rows refer to an axis that the graph does not have")
    if not {item.column for item in graph.results} | {slot.final for slot in graph.state} <= available:
        raise ValueError("a result refers to a column that no node gives")
    if graph.evaluation is not None:
        _consistent(graph.evaluation)


@lru_cache
def _adapter(kind: type) -> Any:
    from pydantic import ConfigDict, TypeAdapter, with_config

    return TypeAdapter(with_config(ConfigDict(extra="forbid"))(kind))


def identity(graph: Graph) -> str:
    """Return 16 hex digits that identify what an iteration computes, including the code of its functions."""
    return hashlib.sha256(pack(_placeless(graph))).hexdigest()[:16]


def _placeless(graph: Graph) -> Graph:
    evaluation = _placeless(graph.evaluation) if graph.evaluation else None
    return dataclasses.replace(
        graph, nodes=tuple(_placeless_node(node) for node in graph.nodes), evaluation=evaluation
    )


def _placeless_node(node: Node) -> Node:
    return dataclasses.replace(
        node, place=None, definition=None, body=_placeless(node.body) if node.body else None
    )
