"""Loading restores the saved state bit for bit."""

import json
import math
import struct

import pytest
import torch
from safetensors.torch import load_file

from rlflow.checkpoints import plain_state as states
from rlflow.checkpoints.reading import load_latest, verify
from rlflow.checkpoints.role_tensors import role_tensors, trainer_state
from rlflow.checkpoints.snapshot import Snapshot, host_copy
from rlflow.checkpoints.writer import Writer
from rlflow.errors import PlanError

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
]


def saved(run, snapshot, **settings):
    with Writer(run, **settings) as writer:
        writer.submit(snapshot)
    assert writer.failures == []
    return load_latest(run)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (5,), (3, 4, 2)], ids=str)
def test_tensors_of_every_dtype_and_shape_come_back_bit_for_bit(tmp_path, campaign, dtype, shape):
    count = math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
    chance = torch.Generator().manual_seed(count)
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8, generator=chance)
    tensor = raw.view(dtype).reshape(shape)
    snapshot = Snapshot(
        0, {"g": {"first": tensor, "beside": torch.ones(3, dtype=torch.int8), "a": tensor.clone()}}
    )
    loaded = saved(tmp_path, snapshot)
    assert campaign.same(loaded.snapshot, snapshot)
    assert loaded.rejected == []
    assert loaded.path == tmp_path / "checkpoints" / "step-00000000"


def test_a_snapshot_counts_the_bytes_of_its_tensors_and_files():
    tensors = {
        "one": {"a": torch.zeros(3, 5), "b": torch.zeros(7, dtype=torch.int8)},
        "other": {"c": torch.zeros(2, dtype=torch.float64)},
    }
    assert Snapshot(0, tensors).bytes == 60 + 7 + 16
    assert Snapshot(0, tensors, files={"queue/a": b"12345", "b": b""}).bytes == 83 + 5


def test_shards_files_and_order_come_back(tmp_path, campaign):
    loaded = saved(tmp_path, campaign.example(7), shard_bytes=500)
    assert campaign.same(loaded.snapshot, campaign.example(7))
    shards = sorted(path.name for path in loaded.path.glob("actor.parameters*"))
    assert shards == [
        "actor.parameters-00001-of-00002.safetensors",
        "actor.parameters-00002-of-00002.safetensors",
    ]


def test_files_of_tensors_are_read_by_the_library(tmp_path, campaign):
    loaded = saved(tmp_path, campaign.example(7))
    for group, tensors in campaign.example(7).tensors.items():
        read = load_file(loaded.path / f"{group}.safetensors")
        assert {name: campaign.bits(t) for name, t in read.items()} == {
            name: campaign.bits(t) for name, t in tensors.items()
        }


def test_the_manifest_is_json_that_lists_every_file_with_size_and_digest(tmp_path, campaign):
    import hashlib

    loaded = saved(tmp_path, campaign.example(7))
    manifest = json.loads((loaded.path / "manifest.json").read_text())["manifest"]
    assert (manifest["format"], manifest["version"], manifest["iteration"]) == ("rlflow-checkpoint", 1, 7)
    paths = [path for path in loaded.path.rglob("*") if path.is_file() and path.name != "manifest.json"]
    on_disk = {path.relative_to(loaded.path).as_posix(): path.read_bytes() for path in paths}
    assert manifest["files"] == {
        n: {"bytes": len(d), "sha256": hashlib.sha256(d).hexdigest()} for n, d in on_disk.items()
    }
    assert verify(loaded.path) == []


def test_floats_of_the_state_come_back_bit_for_bit():
    chance = torch.Generator().manual_seed(0)
    patterns = torch.randint(-(2**63), 2**63 - 1, (20_000,), generator=chance).tolist()
    special = [0.0, -0.0, 5e-324, math.inf, -math.inf, math.nan, -math.nan, 0.1, 1 / 3, 1e308, 2.0**53 + 1]
    values = [struct.unpack(">d", struct.pack(">q", pattern))[0] for pattern in patterns] + special
    back = states.loads(states.dumps(states.plain(values)))
    assert [struct.pack(">d", value) for value in back] == [struct.pack(">d", value) for value in values]


def test_state_of_every_plain_kind_comes_back(tmp_path):
    state = {
        "none": None,
        "yes": True,
        "seed": 2**127 + 1,
        "text": "ä\0\n\ud800",
        "nested": {"list": [1, [2.5, {}]], "": -0.0},
    }
    assert repr(saved(tmp_path, Snapshot(1, state=state)).snapshot.state) == repr(state)


UNFIT = [
    ({1: 2}, "state"),
    ({"a": [{"b": {1}}]}, r"state.a\[0\].b"),
    ({"a": torch.ones(1)}, "state.a"),
    ({"$float": 1}, "state"),
    ({"a": b""}, "state.a"),
    ({"a": 1 << 9000}, "state.a"),
]


@pytest.mark.parametrize(("value", "place"), UNFIT)
def test_state_that_is_not_json_is_refused_when_the_snapshot_is_made(value, place):
    with pytest.raises(PlanError, match=place):
        Snapshot(0, state=value)


def test_state_that_contains_itself_is_refused():
    state = {}
    state["self"] = state
    with pytest.raises(PlanError, match="nested too deeply"):
        Snapshot(0, state=state)


def test_a_snapshot_does_not_change_while_training_continues(tmp_path):
    live, cursor = {"w": torch.ones(4).t(), "tied": torch.arange(6.0).reshape(2, 3).t()}, {"position": [1]}
    snapshot = Snapshot(1, {"g": host_copy(live)}, cursor)
    for tensor in live.values():
        tensor.mul_(0)
    cursor["position"][0] = 2
    loaded = saved(tmp_path, snapshot).snapshot
    assert loaded.tensors["g"]["w"].tolist() == [1] * 4
    assert loaded.tensors["g"]["tied"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert loaded.state == {"position": [1]}


def test_a_trainers_state_becomes_groups_in_hugging_face_names_and_back():
    state = {"parameters/model.a": torch.ones(1), "exp_avg/model.a": torch.ones(1), "steps": torch.tensor(3)}
    groups = role_tensors("actor", state)
    assert {group: list(tensors) for group, tensors in groups.items()} == {
        "actor.parameters": ["model.a"],
        "actor.optimizer": ["exp_avg/model.a", "steps"],
    }
    assert trainer_state(groups, "actor").keys() == state.keys()
    with pytest.raises(PlanError, match=r"no role 'critic'(.|\n)*found: +actor"):
        trainer_state(groups, "critic")


def test_only_the_wanted_groups_are_loaded(tmp_path, campaign):
    saved(tmp_path, campaign.example(7))
    assert list(load_latest(tmp_path, lambda group: group == "surplus").snapshot.tensors) == ["surplus"]


def test_a_run_without_checkpoints_is_reported(tmp_path):
    with pytest.raises(PlanError, match="has no checkpoint"):
        load_latest(tmp_path)
