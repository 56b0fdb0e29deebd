"""The files of a model folder that hold weights."""

import json

import pytest

from rlflow.checkpoints.model_files import index_files, weight_files


def files(folder):
    return [path.name for path in weight_files(folder)]


def test_weights_in_several_files_are_those_in_the_index(tmp_path):
    for name in ("model-1.safetensors", "model-2.safetensors", "other.safetensors"):
        (tmp_path / name).write_bytes(b"")
    index = {
        "weight_map": {
            "b": "model-2.safetensors",
            "a": "model-1.safetensors",
            "c": "model-1.safetensors",
            "d": "gone.safetensors",
        }
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert files(tmp_path) == ["model-1.safetensors", "model-2.safetensors"]
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert files(tmp_path) == ["model.safetensors"]


@pytest.mark.parametrize("text", ["no json", "[]", '{"weight_map": 3}'])
def test_an_empty_index_names_no_file(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert files(tmp_path) == []


def test_index_files_are_the_existing_ones(tmp_path):
    assert index_files(tmp_path) == []
    for name in ("model.safetensors.index.json", "adapter_config.json", "config.json"):
        (tmp_path / name).write_text("{}")
    assert [file.name for file in index_files(tmp_path)] == [
        "model.safetensors.index.json",
        "adapter_config.json",
    ]
