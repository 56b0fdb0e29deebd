"""Folders that request code execution or contain pickles: rlflow runs and reads neither, whatever is on
standard input.
"""

import ast
import contextlib
import importlib
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sources import TASKS, source, sources
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig

from rlflow import PlanError
from rlflow.backends.local.tokenizer import load_tokenizer
from rlflow.data import open_data
from rlflow.training import pretrained
from rlflow.training.protocols import ModelSpec

MODEL = TASKS / "arithmetic_model"
EVIL = """
import pathlib
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
pathlib.Path({mark!r}).touch()
class Config(LlamaConfig): model_type = "unheard-of"
class Model(LlamaForCausalLM): config_class = Config
class Tokenizer(PreTrainedTokenizerFast): pass
"""
NAMES = {
    "AutoConfig": "evil.Config",
    "AutoModelForCausalLM": "evil.Model",
    "AutoModelForSequenceClassification": "evil.Model",
    "AutoTokenizer": ["evil.Tokenizer", None],
}


@pytest.fixture(autouse=True)
def yes(monkeypatch):
    """Standard input that answers y to every question."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 100))


@pytest.fixture
def hostile(tmp_path):
    """Return a function that makes a folder whose configs name code that leaves a mark. ``unknown``: the
    files need that code in transformers.
    """

    def make(*unknown):
        folder = shutil.copytree(MODEL, tmp_path / "model")
        (folder / "evil.py").write_text(EVIL.format(mark=str(tmp_path / "mark")))
        changed(
            folder / "config.json",
            auto_map=NAMES,
            **({"model_type": "unheard-of"} if "config.json" in unknown else {}),
        )
        changed(
            folder / "tokenizer_config.json",
            auto_map={"AutoTokenizer": ["evil.Tokenizer", None]},
            **({"tokenizer_class": "Unheard"} if "tokenizer_config.json" in unknown else {}),
        )
        return folder

    yield make
    assert not (tmp_path / "mark").exists()


def changed(file, **entries):
    """Rewrite a JSON file with other entries; None removes an entry."""
    content = json.loads(file.read_text()) | entries
    file.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


def calls(file):
    return [node for node in file.nodes if isinstance(node, ast.Call)]


LOADS = {
    "from_pretrained",
    "from_config",
    "get_class_from_dynamic_module",
    "load_dataset",
    "AutoPeftModel",
    "pipeline",
}
ALONE = {
    Path(name)
    for name in (  # measured separately from rlflow; a file outside any folder; names in other projects' scripts
        "benchmarks/suite/peers/bare.py",
        "benchmarks/suite/suites/fixed_shape.py",
        "benchmarks/suite/suites/gemma.py",
        "rlflow/cli/importers/trl_script.py",
    )
}


def test_one_module_loads_model_folders_and_trusts_no_code():
    mentions = [
        file
        for file in sources("rlflow", "backends", "algorithms", "benchmarks")
        if any(word in file.text for word in LOADS)
    ]
    named = {
        file
        for file in mentions
        for node in file.nodes
        if (isinstance(node, ast.Attribute) and node.attr in LOADS)
        or (isinstance(node, ast.Constant) and node.value in LOADS)
        or (isinstance(node, ast.alias) and node.name in LOADS)
    }
    assert {file.path for file in named} == {Path("rlflow/training/pretrained.py"), *ALONE}
    loads = [
        call
        for file in named
        for call in calls(file)
        if isinstance(call.func, ast.Attribute) and call.func.attr in LOADS
    ]
    assert len(loads) > 6
    for call in loads:
        keyword_values = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert keyword_values.get("trust_remote_code") == "False", ast.unparse(call)
        assert call.func.attr == "from_config" or keyword_values.get("local_files_only") == "True", (
            ast.unparse(call)
        )


def test_options_of_engines_trust_no_code_and_read_no_pickles():
    found = {
        ast.unparse(key).strip("'"): ast.unparse(value)
        for node in source(Path("backends/vllm/vllm_engine.py")).nodes
        if isinstance(node, ast.Dict)
        for key, value in zip(node.keys, node.values, strict=True)
        if key
    }
    assert found["trust_remote_code"] == "False"
    assert found["load_format"] == "'safetensors'"


@pytest.mark.slow
def test_no_module_reads_user_pickles():
    """``ray.cloudpickle``, between processes of one run, is the only use."""
    reads = {
        "torch.load",
        "torch.jit.load",
        "torch.package.PackageImporter",
        "torch.hub.load",
        "np.load",
        "numpy.load",
        "yaml.load",
        "pickle.load",
        "pickle.loads",
        "marshal.loads",
        "dill.load",
        "joblib.load",
        "pd.read_pickle",
    }
    ends, everything = (
        {name.rpartition(".")[2] for name in reads},
        sources("rlflow", "backends", "algorithms", "benchmarks"),
    )
    found = [
        (str(file.path), ast.unparse(call.func))
        for file in everything
        for call in calls(file)
        if isinstance(call.func, ast.Attribute) and call.func.attr in ends
    ]
    assert [name for name in found if name[1] in reads] == []
    assert [
        file.path
        for file in everything
        for call in calls(file)
        for keyword in call.keywords
        if keyword.arg == "allow_pickle"
    ] == []


def test_code_of_a_folder_is_not_needed_for_known_models(hostile):
    folder = hostile()
    assert type(pretrained.read_config(folder)).__module__.startswith("transformers.")
    assert type(pretrained.read_tokenizer(folder)).__module__.startswith("transformers.")
    for kind in (AutoModelForCausalLM, AutoModelForSequenceClassification):
        assert type(pretrained.read_model(kind, folder, dtype=torch.float32)).__module__.startswith(
            "transformers."
        )
    assert "AutoConfig: evil.Config" in pretrained.named_code(folder)


def test_a_config_that_needs_code_is_refused(hostile):
    folder = hostile("config.json")
    for load in (
        pretrained.check,
        pretrained.read_config,
        lambda folder: pretrained.read_model(AutoModelForCausalLM, folder),
    ):
        with pytest.raises(
            PlanError, match=r"needs its own Python code(.|\n)*auto_map in config.json: Auto\w+: evil\.\w+"
        ):
            load(folder)


def test_a_model_that_needs_code_is_refused_despite_a_known_config(hostile):
    folder = hostile()
    changed(folder / "config.json", model_type="vit", architectures=None)
    with pytest.raises(PlanError, match=r"auto_map in config.json: AutoModelForCausalLM: evil\.Model"):
        pretrained.read_model(AutoModelForCausalLM, folder)


@pytest.mark.parametrize(
    "read",
    [load_tokenizer, lambda folder: open_data("data.jsonl", tokenizer=folder)],
    ids=["backend", "data"],
)
@pytest.mark.parametrize(
    "named", [["evil.Tokenizer", None], [None, "evil.Tokenizer"], ["evil.Tokenizer"]], ids=str
)
def test_a_tokenizer_that_needs_code_is_refused(hostile, read, named):
    folder = hostile("config.json", "tokenizer_config.json")
    changed(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": named})
    with pytest.raises(
        PlanError,
        match=r"needs its own Python code(.|\n)*auto_map in tokenizer_config.json: AutoTokenizer: evil",
    ):
        read(folder)


def test_a_load_without_the_option_does_not_prompt(hostile):
    folder = hostile("config.json", "tokenizer_config.json")
    pretrained.refuse_folder_code()
    with pytest.raises(ValueError, match="custom code"):
        AutoTokenizer.from_pretrained(folder)
    assert sys.stdin.read().count("y") == 100


def test_a_kernel_named_by_a_config_is_not_fetched(hostile):
    for value in ("owner/kernel", {"text_config": "owner/kernel:function"}):
        folder = hostile()
        changed(folder / "config.json", attn_implementation=value)
        with pytest.raises(PlanError, match="names code to fetch and run"):
            pretrained.read_config(folder)
        shutil.rmtree(folder)


class Bomb:
    """An object that leaves a mark when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (Path(self.mark),)


@pytest.fixture
def pickled(tmp_path):
    """Return a folder whose weights are pickles, one of them a bomb."""
    folder = shutil.copytree(MODEL, tmp_path / "pickled", ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save({"bomb": Bomb(tmp_path / "mark")}, folder / "pytorch_model.bin")
    yield folder
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("backend", ["local", "vllm", "fsdp", "deepspeed"])
def test_each_backend_refuses_pickles_and_code(backend, pickled, hostile):
    module = importlib.import_module(f"rlflow.backends.{backend}")
    half = getattr(module, "Trainer", None) or module.Generator
    for folder, words in (
        (pickled, "without running code"),
        (hostile("config.json"), "needs its own Python code"),
    ):
        with pytest.raises(PlanError, match=words):
            half(ModelSpec(folder))


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt", "consolidated.00.pth"]
)
def test_pickled_weights_are_refused_with_a_remedy(pickled, name):
    (pickled / "pytorch_model.bin").rename(pickled / name)
    for load in (pretrained.read_config, lambda folder: pretrained.read_model(AutoModelForCausalLM, folder)):
        with pytest.raises(
            PlanError,
            match=rf"no weights that can be loaded without running code\n +found: +{name}(.|\n)*convert it "
            r"once",
        ):
            load(pickled)


def test_a_safetensors_index_that_points_to_pickles_is_refused(pickled):
    (pickled / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": {"bomb": "pytorch_model.bin"}})
    )
    with pytest.raises(PlanError, match="without running code"):
        pretrained.read_model(AutoModelForCausalLM, pickled)


def test_pickles_next_to_safetensors_are_ignored(pickled):
    shutil.copy(MODEL / "model.safetensors", pickled)
    assert pretrained.read_model(AutoModelForCausalLM, pickled) is not None


def test_adapters_next_to_weights_are_refused(tmp_path):
    """transformers would read adapter_model.bin. vLLM would ignore the adapter and sample from another model
    than the trained one.
    """
    folder = shutil.copytree(MODEL, tmp_path / "model")
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(PlanError, match="contains an adapter"):
        pretrained.read_model(AutoModelForCausalLM, folder)


ODD = {
    "empty": "",
    "list": "[]",
    "cut": "{",
    "deep": "[" * 10**5,
    "text": '{"auto_map": "evil.py"}',
    "odd": '{"auto_map": [[1]], "attn_implementation": [3], "model_type": [1]}',
}


@pytest.mark.parametrize("content", ODD.values(), ids=ODD)
def test_the_reader_reports_its_own_errors_for_odd_files(tmp_path, content):
    folder = shutil.copytree(MODEL, tmp_path / "model")
    for name in ("config.json", "tokenizer_config.json"):
        (folder / name).write_text(content)
    assert isinstance(pretrained.named_code(folder), list)
    for read in (load_tokenizer, lambda folder: open_data("data.jsonl", tokenizer=folder)):
        with contextlib.suppress(PlanError):
            read(folder)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("content", ["", "[1, 2]", "3", "[" * 100_000, "{"], ids=lambda text: text[:10])
def test_a_config_that_is_no_object_is_refused_by_name(tmp_path, name, content):
    folder = shutil.copytree(MODEL, tmp_path / "model")
    (folder / name).write_text(content)
    with pytest.raises(PlanError, match=f"the file {name} of the model folder .* is damaged"):
        pretrained.check(folder)


def command(*words, folder, **options):
    words = [sys.executable, "-m", "rlflow.cli.main", *map(str, words)]
    return subprocess.run(
        words, input="y\n" * 20, text=True, capture_output=True, cwd=folder, timeout=120, **options
    )


RUN = (
    "--data",
    "gsm",
    "--iterations",
    1,
    "--prompts",
    2,
    "--hp.samples",
    2,
    "--hp.max_tokens",
    2,
    "--held-out",
    0,
)


@pytest.mark.slow
def test_a_run_neither_runs_nor_offers_code_of_its_model_folder(hostile, tmp_path):
    rows = [{"prompt": f"{n} + 1 =", "answer": str(n + 1)} for n in range(8)]
    (tmp_path / "gsm").mkdir()
    (tmp_path / "gsm" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = hostile()
    known = command("run", "grpo", "--model", folder, *RUN, folder=tmp_path)
    assert known.returncode == 0, known.stderr
    assert "names Python code of its own, which is not run: AutoConfig: evil.Config" in known.stdout
    shutil.rmtree(folder)
    refused = command(
        "run", "grpo", "--model", hostile("config.json", "tokenizer_config.json"), *RUN, folder=tmp_path
    )
    assert refused.returncode == 2
    assert "needs its own Python code, and rlflow never runs code of a model folder" in refused.stderr
    assert "[y/N]" not in refused.stdout + refused.stderr


@pytest.mark.slow
def test_the_remedy_for_pickles_gives_a_loadable_folder(tmp_path):
    folder = tmp_path / "old"
    AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        )
    ).save_pretrained(folder)
    before = pretrained.read_model(AutoModelForCausalLM, folder).state_dict()
    torch.save(before, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, folder)
    with pytest.raises(PlanError) as refusal:
        pretrained.read_model(AutoModelForCausalLM, folder)
    words = (
        refusal.value.problems[0]
        .remedy.partition("convert it once: ")[2]
        .replace("python -c", f"{sys.executable} -c")
    )
    subprocess.run(words, shell=True, check=True, capture_output=True, timeout=120)
    after = pretrained.read_model(AutoModelForCausalLM, tmp_path / "old-safe").state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert load_tokenizer(tmp_path / "old-safe") is not None


def test_both_configs_of_a_folder_name_the_ends_of_a_response(tmp_path):
    assert not any(pretrained.read_end_tokens(tmp_path).values())
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert pretrained.read_end_tokens(tmp_path)["config.json"] == (LlamaConfig().eos_token_id,)
    LlamaConfig(eos_token_id=[9, 4]).save_pretrained(tmp_path)
    assert pretrained.read_end_tokens(tmp_path) == {"generation_config.json": (), "config.json": (9, 4)}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert pretrained.read_end_tokens(tmp_path) == {"generation_config.json": (7,), "config.json": (9, 4)}
