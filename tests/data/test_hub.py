"""Models and data of a Hub on loopback: fetched, cached, gated, missing, cut, and without a network."""

import json
import re
import time
from pathlib import Path

import datasets
import huggingface_hub
import pytest
from hub_server import NOWHERE, TOKEN, Hub, reach, serving

import rlflow.data.tasks
from rlflow.data import hub as access
from rlflow.data.hub_names import hub_data, hub_model
from rlflow.data.source import open_data
from rlflow.errors import PlanError

MODEL = Path(next(iter(rlflow.data.tasks.__path__))) / "arithmetic_model"
CARD = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train.jsonl
  - split: test
    path: main/test.jsonl
- config_name: other
  data_files: other/*.jsonl
---
"""


def lines(count: int, term: int = 1) -> str:
    return "".join(
        json.dumps({"question": f"{n}+{term}=", "answer": str(n + term)}) + "\n" for n in range(count)
    )


SUMS = {
    "README.md": CARD,
    "main/train.jsonl": lines(20),
    "main/test.jsonl": lines(5, 2),
    "other/a.jsonl": lines(3, 3),
}


@pytest.fixture(scope="module")
def server():
    with serving(Hub()) as hub:
        hub.model("org/tiny", MODEL)
        hub.model("org/pickles", **{"config.json": "{}", "pytorch_model.bin": b"0"})
        hub.model("org/gated", MODEL).gated = True
        hub.dataset("org/sums", SUMS)
        hub.dataset("org/parts", {f"train-{part}.jsonl": lines(4, part) for part in range(3)})
        yield hub


@pytest.fixture
def hub(server, tmp_path, monkeypatch):
    """Return the Hub; huggingface_hub and datasets use it and an empty cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    reach(monkeypatch, server.url)
    server.requests.clear()
    return server


def refused(call):
    with pytest.raises(PlanError) as caught:
        call()
    (problem,) = caught.value.problems
    assert TOKEN not in str(problem)
    return problem


def test_a_model_is_pinned_described_and_completed_once(hub):
    name = access.pinned(hub_model("org/tiny"))
    assert re.fullmatch("[0-9a-f]{40}", name.commit)
    folder = access.described_model(name)
    assert (folder / "config.json").read_bytes() == (MODEL / "config.json").read_bytes()
    assert access.lacking_weights(folder) == ["model.safetensors"]
    assert hub.asked("model.safetensors") == 0, "the description needs no weights"
    notes = []
    assert access.complete_model(name, notes.append) == folder
    assert len(notes) == 1
    assert (folder / "model.safetensors").stat().st_size == (MODEL / "model.safetensors").stat().st_size
    hub.requests.clear()
    access.complete_model(name, notes.append)
    assert (hub.requests, len(notes)) == ([], 1), "the cache answers"


def test_a_branch_that_moves_changes_new_names_and_not_pinned_ones(hub):
    repository = hub.model("org/moving", MODEL)
    before = access.pinned(hub_model("org/moving"))
    repository.commit({**next(iter(repository.commits.values())), "README.md": "new"})
    assert access.pinned(hub_model("org/moving")) != before
    assert access.pinned(before) == before


def test_what_is_cached_needs_no_network(hub, monkeypatch):
    name = access.pinned(hub_model("org/tiny"))
    access.complete_model(name)
    rows = access.load_data(hub_data("org/sums:main"))
    reach(monkeypatch, NOWHERE)
    assert access.pinned(hub_model("org/tiny")) == name
    assert access.complete_model(name).name == name.commit
    assert access.load_data(hub_data("org/sums:main"))["test"][4] == rows["test"][4]
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert access.pinned(hub_model("org/tiny")) == name


def test_a_model_in_several_files_is_complete_with_all_of_them(hub):
    index = {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}
    files = {"config.json": "{}", "model.safetensors.index.json": json.dumps(index)}
    shards = sorted({*index["weight_map"].values()})
    hub.model("org/large", **files, **dict.fromkeys(shards, b"0"))
    name = access.pinned(hub_model("org/large"))
    assert access.lacking_weights(access.described_model(name)) == shards
    folder = access.complete_model(name)
    assert access.lacking_weights(folder) == []
    (folder / shards[1]).unlink()
    assert access.lacking_weights(folder) == shards[1:]


def test_rows_of_another_commit_are_never_used(hub, monkeypatch):
    access.load_data(hub_data("org/sums:main"))
    for settings in (huggingface_hub.constants, datasets.config):
        monkeypatch.setattr(settings, "HF_HUB_OFFLINE", True)
    assert refused(lambda: access.load_data(hub_data(f"org/sums@{'a' * 40}:main"))).code == "hub-unreachable"


def test_without_a_network_the_error_says_how_to_get_the_files(hub, monkeypatch):
    reach(monkeypatch, NOWHERE)
    model = refused(lambda: access.pinned(hub_model("org/tiny")))
    assert model.code == "hub-unreachable"
    assert NOWHERE in model.found
    assert "hf download org/tiny --local-dir FOLDER" in model.remedy
    data = refused(lambda: access.load_data(hub_data("org/sums:main")))
    assert "--repo-type dataset" in data.remedy
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "unset HF_HUB_OFFLINE" in refused(lambda: access.pinned(hub_model("org/tiny"))).remedy


def test_a_gated_repository_needs_a_token(hub, monkeypatch):
    problem = refused(lambda: access.pinned(hub_model("org/gated")))
    assert problem.code == "hub-gated"
    assert f"{hub.url}/org/gated" in problem.remedy
    assert "HF_TOKEN" in problem.remedy
    monkeypatch.setenv("HF_TOKEN", f"{TOKEN}x")
    assert refused(lambda: access.pinned(hub_model("org/gated"))).code == "hub-token"
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert access.described_model(access.pinned(hub_model("org/gated"))).is_dir()


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda: access.pinned(hub_model("org/none")), "hub-missing"),
        (lambda: access.load_data(hub_data("org/none:main")), "hub-missing"),
        (lambda: access.pinned(hub_model("org/tiny@v9")), "hub-revision"),
        (lambda: access.pinned(hub_data("org/sums@v9")), "hub-revision"),
        (lambda: access.load_data(hub_data("org/sums")), "hub-config"),
        (lambda: access.load_data(hub_data("org/sums:mian")), "hub-config"),
        (lambda: access.complete_model(access.pinned(hub_model("org/pickles"))), "hub-weights"),
        (lambda: access.described_model(access.pinned(hub_model("org/sums"))), "hub-missing"),
    ],
)
def test_what_is_missing_is_named(hub, call, code):
    problem = refused(call)
    assert problem.code == code
    assert problem.remedy


@pytest.mark.slow
def test_a_cut_download_is_an_error_and_the_next_one_completes_it(hub):
    repository = hub.model("org/cut", MODEL)
    repository.cut = {"model.safetensors"}
    name = access.pinned(hub_model("org/cut"))
    problem = refused(lambda: access.complete_model(name))
    assert (problem.code, "repeat the command" in problem.remedy) == ("hub-cut", True)
    repository.cut = set()
    assert access.lacking_weights(access.complete_model(name)) == []


def test_records_of_the_hub_have_a_place_and_a_commit(hub):
    data = open_data("org/sums:main/test")
    assert (len(data), data.name) == (5, "org/sums:main/test")
    assert str(data.records[4].place) == "org/sums:main/test:5"
    assert data.commit == hub.repositories["datasets", "org/sums"].refs["main"]
    assert len(open_data("org/sums:other")) == 3
    assert refused(lambda: open_data("org/sums:main/nope")).code == "data-split"


def test_the_first_records_are_streamed_without_a_copy(hub, tmp_path):
    data = open_data("org/sums:main", max_records=4, stream=True)
    assert [record.question for record in data.records] == ["0+1=", "1+1=", "2+1=", "3+1="]
    assert (len(data.test), data.commit) == (4, hub.repositories["datasets", "org/sums"].refs["main"])
    assert str(data.records[3].place) == "org/sums:main:4"
    assert not list((tmp_path / "datasets").rglob("*.arrow"))
    hub.requests.clear()
    assert len(open_data("org/parts", max_records=6, stream=True)) == 6
    assert (hub.asked("train-1.jsonl") > 0, hub.asked("train-2.jsonl")) == (True, 0)
    assert open_data("org/parts", stream=True).digest == open_data("org/parts").digest
    assert len(open_data("org/sums:main/test", max_records=2, stream=True)) == 2


def test_a_stream_reads_what_the_cache_has(hub, monkeypatch):
    first = open_data("org/sums:main").records[:4]
    reach(monkeypatch, NOWHERE)
    assert open_data("org/sums:main", max_records=4, stream=True).records == first


def test_a_stream_that_the_hub_refuses_is_an_error(hub, monkeypatch):
    assert refused(lambda: open_data("org/sums", stream=True)).code == "hub-config"
    assert refused(lambda: open_data("org/none", stream=True)).code == "hub-missing"
    access.pinned(hub_data("org/sums"))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # between the attempts of the packages
    reach(monkeypatch, NOWHERE)
    assert refused(lambda: open_data("org/sums:main", stream=True)).code == "hub-unreachable"


def test_a_stream_that_is_cut_is_an_error(hub, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # between the attempts of the packages
    repository = hub.dataset("org/cut", {"train.jsonl": lines(4000)})
    assert len(open_data("org/cut", stream=True)) == 4000
    repository.cut = {"train.jsonl"}
    assert refused(lambda: open_data("org/cut", stream=True)).code in ("hub-cut", "hub-unreachable")
