"""One line says where a model comes from, its dtype and its size."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import rlflow.data.tasks
from rlflow.runs.model_lines import model_lines

MODEL = Path(next(iter(rlflow.data.tasks.__path__))) / "arithmetic_model"


def test_each_folder_has_a_line_and_packaged_models_have_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "own"
    cached = tmp_path / "models--org--judge" / "snapshots" / ("a" * 40)
    for folder in (own, cached):
        shutil.copytree(MODEL, folder)
    config = json.loads((cached / "config.json").read_text())
    (cached / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    roles = {name: SimpleNamespace(folder=own) for name in ("actor", "reference")}
    roles |= {"critic": SimpleNamespace(folder=MODEL), "null": SimpleNamespace(folder=None)}
    assert list(model_lines(roles, {"judge": cached}, "float32")) == [
        "model of actor, reference: the local folder own, 947K parameters in float32 (3.8 MB), computed in float32",
        (
            "model of judge: org/judge@aaaaaaaaaaaa of the Hub, 947K parameters in bfloat16 (3.8 MB), computed in "
            "float32"
        ),
    ]


def test_a_folder_that_cannot_be_read_has_no_line(tmp_path):
    assert list(model_lines({"actor": SimpleNamespace(folder=tmp_path)}, {}, "float32")) == []
