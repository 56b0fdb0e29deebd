"""An exported checkpoint is a Hugging Face folder with the same weights and tokenizer."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rlflow.data.tasks
from rlflow.backends.local.settings import TrainerSettings
from rlflow.backends.local.trainer import Trainer
from rlflow.checkpoints.export import export
from rlflow.checkpoints.model_files import model_files
from rlflow.checkpoints.reading import load_latest
from rlflow.checkpoints.role_tensors import role_tensors, trainer_state
from rlflow.checkpoints.snapshot import Snapshot, host_copy
from rlflow.checkpoints.writer import Writer
from rlflow.cli.resume import export_model
from rlflow.errors import PlanError
from rlflow.training.protocols import ModelSpec

MODEL = Path(next(iter(rlflow.data.tasks.__path__))) / "arithmetic_model"


def trainer(folder=MODEL, **spec):
    return Trainer(ModelSpec(folder, trained=True, **spec), TrainerSettings(lr=1e-3))


def stepped(one, seed):
    """Make one optimizer step on a gradient of noise."""
    chance = torch.Generator().manual_seed(seed)
    for parameter in one.network.parameters().values():
        parameter.grad = torch.randn(parameter.shape, generator=chance, dtype=parameter.dtype)
    one.step()
    return one


def save(run, *roles, iteration=1):
    tensors = {}
    files = {}
    for role, one in roles:
        tensors |= role_tensors(role, host_copy(one.state()))
        files |= model_files(MODEL, role)
    run.mkdir(exist_ok=True)
    with Writer(run) as writer:
        writer.submit(Snapshot(iteration, tensors, files=files))
    assert writer.failures == []
    return run


def loaded(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return model.state_dict()


@pytest.fixture(scope="module")
def actor():
    return stepped(trainer(), 1)


def test_transformers_loads_equal_tensors_and_the_tokenizer(tmp_path, actor):
    run = save(tmp_path / "run", ("actor", actor))
    done = export(run, tmp_path / "out")
    model, own = loaded(tmp_path / "out"), dict(actor.weights())
    assert done.path.name == "step-00000001"
    assert all(
        torch.equal(model[name], tensor) and model[name].dtype == tensor.dtype for name, tensor in own.items()
    )
    assert not torch.equal(own["model.embed_tokens.weight"], loaded(MODEL)["model.embed_tokens.weight"])
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode("12 + 7") == AutoTokenizer.from_pretrained(
        MODEL
    ).encode("12 + 7")
    assert {p.name for p in (tmp_path / "out").iterdir()} == {p.name for p in MODEL.iterdir()}


def test_large_weights_are_split_into_shards_with_an_index(tmp_path, actor):
    run = save(tmp_path / "run", ("actor", actor))
    export(run / "checkpoints/step-00000001", tmp_path / "out", "actor", shard_bytes=1 << 20)
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 2
    model = loaded(tmp_path / "out")
    assert all(torch.equal(model[name], tensor) for name, tensor in actor.weights())


def test_the_config_names_the_dtype_of_the_weights(tmp_path):
    one = trainer(dtype="float64")
    run = save(tmp_path / "run", ("actor", one))
    export(run, tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "float64"
    model = loaded(tmp_path / "out")
    assert all(
        torch.equal(model[name], tensor) and tensor.dtype == torch.float64 for name, tensor in one.weights()
    )


def test_a_critics_value_head_is_stored_next_to_its_model(tmp_path, actor):
    critic = stepped(trainer(head="values"), 2)
    run = save(tmp_path / "run", ("actor", actor), ("critic", critic))
    export(run, tmp_path / "out", "critic")
    again = trainer(tmp_path / "out", head="values")
    assert torch.equal(again.network.head.weight, critic.network.head.weight)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(again.weights(), critic.weights(), strict=True))
    with pytest.raises(PlanError, match=r"several roles(.|\n)*actor, critic"):
        export(run, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_trainer_restored_from_disk_continues_bit_for_bit(tmp_path):
    straight = stepped(stepped(trainer(), 1), 2)
    run = save(tmp_path / "run", ("actor", stepped(trainer(), 1)))
    resumed = trainer()
    resumed.restore(trainer_state(load_latest(run).snapshot.tensors, "actor"))
    stepped(resumed, 2)
    want, got = straight.state(), resumed.state()
    assert want.keys() == got.keys()
    assert all(torch.equal(want[name], got[name]) for name in want)


def test_only_an_empty_folder_is_accepted(tmp_path, actor):
    run = save(tmp_path / "run", ("actor", actor))
    (tmp_path / "out").mkdir()
    export(run, tmp_path / "out")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    with pytest.raises(PlanError, match="exists and is not empty"):
        export(run, tmp_path / "out")
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}


def test_the_newest_good_checkpoint_is_exported(tmp_path, actor):
    run = save(save(tmp_path / "run", ("actor", actor)), ("actor", actor), iteration=2)
    (run / "checkpoints/step-00000002/actor.optimizer.safetensors").write_bytes(b"")
    with pytest.raises(PlanError, match=r"damaged(.|\n)*actor.optimizer.safetensors: found 0 bytes"):
        export(run / "checkpoints/step-00000002", tmp_path / "out")
    done = export(run, tmp_path / "out")
    assert (done.path.name, len(done.rejected)) == ("step-00000001", 1)


def test_the_command_names_damaged_checkpoints_and_its_output(tmp_path, actor, capsys):
    run = save(save(tmp_path / "run", ("actor", actor)), ("actor", actor), iteration=2)
    (run / "checkpoints/step-00000002/actor.optimizer.safetensors").write_bytes(b"")
    (run / "metrics.jsonl").touch()  # a folder is recognised as a run's by these
    assert export_model(str(run), str(tmp_path / "out"), None) == 0
    damaged, wrote = capsys.readouterr().out.splitlines()
    assert damaged.startswith("step-00000002 is damaged and is not used: ")
    assert wrote == f"wrote {tmp_path / 'out'} from {run / 'checkpoints' / 'step-00000001'}"


def test_an_export_without_enough_space_leaves_nothing(tmp_path, disk, actor):
    run = save(tmp_path / "run", ("actor", actor))
    disk.fill()
    with pytest.raises(PlanError, match="No space left"):
        export(run, disk.path / "out")
    disk.empty()
    assert list(disk.path.iterdir()) == []


def test_no_code_of_a_model_folder_is_kept(tmp_path):
    for name in (
        "config.json",
        "modeling.py",
        "model.safetensors",
        "model.safetensors.index.json",
        "merges.txt",
        "weights.bin",
    ):
        (tmp_path / name).write_bytes(b"{}")
    assert list(model_files(tmp_path, "actor")) == ["actor/config.json", "actor/merges.txt"]
