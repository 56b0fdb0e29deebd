"""Graphs as bytes, and their identity."""

import contextlib
import dataclasses
import functools

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.author.load import load_flow
from rlflow.author.node_options import ShownOptions
from rlflow.compiler.graph.model import Column, Input, Op
from rlflow.compiler.graph.wire import identity, pack, unpack
from rlflow.compiler.trace.compile import TraceOptions, compile_flow
from rlflow.errors import PlanError

PPO = compile_flow(load_flow("ppo")).graph
BYTES = pack(PPO)


@pytest.mark.parametrize("name", ["ppo", "repeated"])
def test_a_packed_graph_unpacks_to_itself(name, request):
    graph = request.getfixturevalue(name)
    assert unpack(pack(graph)) == graph
    assert identity(unpack(pack(graph))) == identity(graph)


SAMPLING = {"actor.generate": {"stop_token_ids": (1, 2), "lengths": (3,), "stop": ("(", "7"), "top_k": 2**70}}
JOINT = (
    'actor.update(batch, (policy_loss, policy_loss), mean=("tokens", 3), scale=(1, 0.5), '
    'where=(None, "keep"))'
)


def test_settings_of_methods_are_stored_as_pairs_with_their_types(repeated_text, tmp_path):
    (tmp_path / "joint.py").write_text(repeated_text.replace("actor.update(batch, policy_loss)", JOINT))
    graph = compile_flow(load_flow(str(tmp_path / "joint.py")), options=TraceOptions(sampling=SAMPLING)).graph
    again = unpack(pack(graph))
    assert again == graph
    update = next(node for node in again.nodes if node.op is Op.UPDATE)
    assert (update.settings.mean, update.settings.scale, update.settings.where) == (
        ("tokens", 3),
        (1.0, 0.5),
        (None, "keep"),
    )
    assert repr(update.settings.mean) == "('tokens', 3)"  # 3.0 would be another graph
    (sampling,) = [
        node.settings for node in again.by_name["repeat.body"].body.nodes if node.op is Op.GENERATE
    ]
    assert (sampling.stop_token_ids, sampling.lengths, sampling.stop, sampling.top_k) == (
        (1, 2),
        (3,),
        ("(", "7"),
        2**70,
    )
    packed = msgpack.unpackb(pack(graph))["graph"]["nodes"][update.id]["settings"]
    assert [name for name, _ in packed] == [
        "epochs",
        "minibatch",
        "mean",
        "after",
        "scale",
        "where",
        "losses",
    ]


def test_settings_stay_pairs_if_one_is_masked():
    masked = ShownOptions((("samples", 2), ("stop_token_ids", "***")))
    nodes = tuple(
        dataclasses.replace(node, settings=masked) if node.op is Op.GENERATE else node for node in PPO.nodes
    )
    assert unpack(pack(dataclasses.replace(PPO, nodes=nodes))).nodes == nodes


@given(st.binary(max_size=64))
def test_foreign_bytes_are_a_plan_error(data):
    with pytest.raises(PlanError):
        unpack(data)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, len(BYTES) - 1), st.integers(0, 255), st.sampled_from(["set", "cut", "drop", "double"]))
def test_damaged_bytes_give_a_plan_error_or_a_sound_graph(place, value, how):
    changed = {
        "set": BYTES[:place] + bytes([value]) + BYTES[place + 1 :],
        "cut": BYTES[:place],
        "drop": BYTES[:place] + BYTES[place + 1 :],
        "double": BYTES[: place + 1] + BYTES[place:],
    }[how]
    with contextlib.suppress(PlanError):
        graph = unpack(changed)
        assert str(graph)
        assert graph.order.number_of_nodes() == len(graph.nodes)


def edited(change):
    envelope = msgpack.unpackb(BYTES)
    change(envelope)
    return msgpack.packb(envelope)


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("another version", lambda e: e.update(version=2)),
        ("another format", lambda e: e.update(format="rlflow-plan")),
        ("no graph", lambda e: e.pop("graph")),
        ("an unknown field", lambda e: e["graph"]["nodes"][0].update(colour="red")),
        ("a missing field", lambda e: e["graph"]["nodes"][0].pop("op")),
        ("a number as text", lambda e: e["graph"]["nodes"][0].update(id="0")),
        ("a node of another number", lambda e: e["graph"]["nodes"][3].update(id=7)),
        ("rows that are not there", lambda e: e["graph"]["nodes"][3].update(axis=9)),
        ("two nodes of one name", lambda e: e["graph"]["nodes"][3].update(name="reward")),
        (
            "an input from a later node",
            lambda e: e["graph"]["nodes"][3]["inputs"][0]["column"].update(node=9),
        ),
        (
            "an input that nobody gives",
            lambda e: e["graph"]["nodes"][3]["inputs"][0]["column"].update(name="nothing"),
        ),
        ("rows of rows that are not there", lambda e: e["graph"]["axes"][1].update(parent=5)),
        ("deep nesting", lambda e: e.update(graph=functools.reduce(lambda x, _: [x], range(400), 0))),
    ],
)
def test_a_graph_of_another_version_is_a_plan_error(what, change):
    with pytest.raises(PlanError, match="these bytes are not a graph of this version"):
        unpack(edited(change))


def test_moving_a_file_keeps_its_identity_and_changing_it_does_not(graph_of, repeated_text):
    first = identity(graph_of(repeated_text))
    assert identity(graph_of("# a comment, and two lines more\n\n" + repeated_text, "moved.py")) == first
    changes = [
        ("scores.mean()", "scores.sum()"),  # a stage's body
        ("groups: int = 4", "groups: int = 5"),  # a setting
        ("scores[:, None]", "scores[:, None] / 2"),  # a loss's body
        ("samples=2", "samples=4"),  # a method's setting, within the body
        ('"bar": 0.25', '"bar": 0.5'),  # the initial state
        ("limit=hp.limit", "limit=1.0"),  # a stage's setting
        ("RANK0)", "RANK0, timeout=9)"),
    ]
    assert all(old in repeated_text for old, _ in changes)
    others = [identity(graph_of(repeated_text.replace(old, new))) for old, new in changes]
    assert len({first, *others}) == 1 + len(changes)


def test_results_of_unknown_nodes_are_refused():
    with pytest.raises(PlanError):
        unpack(pack(dataclasses.replace(PPO, results=(Input("x", Column(99, "x")),))))


def test_numbers_beyond_the_format_are_stored_as_text(graph_of, repeated_text):
    graph = graph_of(repeated_text.replace("groups: int = 4", "groups: int = 4\n    seed: int = 2**70"))
    assert dict(unpack(pack(graph)).hp)["seed"] == str(2**70)
