"""The recipes of `rlflow new --recipe`: `check` and `plan` accept them as they are, and the memory that their
comments name is the memory that `plan` counts. The models have the sizes of the real ones and no weights."""

import json
import re
import struct
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import huggingface_hub
import pytest
from hub_server import Hub, reach, serving
from served import asking
from sources import ROOT

import rlflow.data.tasks
from rlflow import PlanError
from rlflow.cli.main import exit_code
from rlflow.cli.recipes import purposes, recipes, write_recipe
from rlflow.data.data_spec import parse_source
from rlflow.data.hub_names import hub_data
from rlflow.processes.sandbox import probe
from rlflow.recipes.code import passed
from rlflow.services.serving.code import runner

TOKENIZER = Path(next(iter(rlflow.data.tasks.__path__))) / "arithmetic_model"
# reads the variable that recipes set, and ends each message with the tokenizer's end token
TEMPLATE = (
    "{% if enable_thinking is defined %}{% endif %}"
    "{% for message in messages %}{{ message.role }}\n{{ message.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant\n{% endif %}"
)
QWEN3 = {"model_type": "qwen3", "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
QWEN2 = {"model_type": "qwen2", "num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 128}
SIZES = {"num_hidden_layers": 28, "vocab_size": 151936, "tie_word_embeddings": True, "dtype": "bfloat16"}
MODELS = {
    "Qwen/Qwen3-0.6B": QWEN3 | {"hidden_size": 1024, "intermediate_size": 3072},
    "Qwen/Qwen3-1.7B": QWEN3 | {"hidden_size": 2048, "intermediate_size": 6144},
    "Qwen/Qwen2.5-1.5B-Instruct": QWEN2 | {"hidden_size": 1536, "intermediate_size": 8960},
    "Qwen/Qwen2.5-Coder-1.5B-Instruct": QWEN2 | {"hidden_size": 1536, "intermediate_size": 8960},
}
COUNTED = re.compile(r"rlflow plan counts (\d+\.\d GB)")


def shapes(config):
    """Return name → shape of the weights of a Qwen model."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    layer = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
    }
    if config["model_type"] == "qwen3":
        layer |= {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
    else:
        layer |= {
            f"self_attn.{part}_proj.bias": (size,)
            for part, size in zip("qkv", (queries, keys, keys), strict=True)
        }
    ends = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    return ends | {
        f"model.layers.{number}.{name}": shape
        for number in range(config["num_hidden_layers"])
        for name, shape in layer.items()
    }


def write_model(folder, config):
    """Write a model folder whose weights are a hole in a file: it takes no space, and only the header is read."""
    folder.mkdir(parents=True)
    for path in TOKENIZER.glob("tokenizer*"):
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    header, end = {}, 0
    for name, shape in shapes(config).items():
        start, end = end, end + 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, config in MODELS.items():
        write_model(folder / name, SIZES | config)
    return folder


@pytest.fixture(scope="module")
def hub():
    """A Hub that knows the data sets of the recipes. It has no rows: a request for them fails."""
    with serving(Hub()) as hub:
        for path in recipes().values():
            source = tomllib.loads(path.read_text())["data"]["source"]
            hub.dataset(hub_data(parse_source(source).path).repository, {"README.md": "---\n---\n"})
        yield hub


@pytest.fixture
def folder(models, hub, tmp_path, monkeypatch):
    """A working folder in which the Hub names of models are folders."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen").symlink_to(models / "Qwen")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    reach(monkeypatch, hub.url)
    return tmp_path


@pytest.mark.parametrize("name", recipes())
def test_a_copied_recipe_passes_check_and_plan_and_names_its_memory(folder, name, capsys):
    assert write_recipe(Path("mine"), name) == 0
    assert capsys.readouterr().out.endswith("  rlflow run grpo --config mine.toml\n")
    text = Path("mine.toml").read_text()
    settings = [line for line in text.splitlines() if not line.startswith("#")]
    assert 10 <= len(settings) <= 18
    assert "examples/recipes" not in text, "the copy uses its own files"
    assert exit_code(["check", "grpo", "--config", "mine.toml"]) == 0, capsys.readouterr().out
    assert exit_code(["plan", "grpo", "--config", "mine.toml"]) == 0, capsys.readouterr().err
    table = capsys.readouterr().out.partition("memory of each rank")[2].splitlines()
    rows = [re.split(r"\s{2,}", row.strip()) for row in table]
    total = next(row[-1] for row in rows if row[1:2] == ["all"])
    assert COUNTED.search(" ".join(text.split("\n# ")))[1] == total


def test_the_page_describes_each_recipe():
    page = (ROOT / "docs" / "models.md").read_text()
    rows = re.findall(r"^\| \[`(\w+)`\]\(\.\./examples/recipes/(\w+)\.toml\)", page, re.MULTILINE)
    assert sorted(rows) == [(name, name) for name in recipes()]


def test_the_recipes_say_what_was_measured_and_what_was_not():
    for path in recipes().values():
        text = path.read_text()
        assert "# Needs: " in text
        assert "Not measured: " in text


def test_an_unknown_recipe_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(PlanError, match="rlflow ships no recipe 'gsm8'") as error:
        write_recipe(tmp_path / "mine", "gsm8")
    problem = error.value.problems[0]
    assert (problem.expected, problem.nearest) == (", ".join(recipes()), "gsm8k")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("taken", ["mine.toml", "mine.py"])
def test_a_recipe_overwrites_no_file_and_writes_no_part(tmp_path, taken):
    (tmp_path / taken).write_text("kept")
    with pytest.raises(PlanError, match="already exists"):
        write_recipe(tmp_path / "mine.toml", "code")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["kept"]


def test_a_name_that_toml_cannot_hold_is_refused(tmp_path):
    with pytest.raises(PlanError, match="cannot be the name"):
        write_recipe(tmp_path / 'a"b', "code")


def test_the_list_has_each_recipe_with_its_purpose(capsys):
    assert exit_code(["new", "--list"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{name:12} {purpose}" for name, purpose in purposes().items()
    ]
    assert all(purposes().values())


def test_a_recipe_and_an_algorithm_cannot_be_copied_at_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert exit_code(["new", "mine", "--from", "ppo", "--recipe", "code"]) == 2
    assert "--from" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


FENCED = "The function:\n```python\n{}\n```\n"
REPLIES = {  # reply → score
    FENCED.format("def add(a, b):\n    return a + b"): 1.0,
    FENCED.format("def total(a, b):\n    return a + b"): 1.0,  # the prompt does not name the function
    FENCED.format("def add(a, b):\n    return a - b"): 0.0,
    FENCED.format("def add(a, b):\n    raise SystemExit(0)"): 0.0,
    FENCED.format("import os\nos._exit(0)"): 0.0,
    FENCED.format("def add(a, b)"): 0.0,
    "def add(a, b): return a + b": 0.0,
}


@pytest.mark.skipif(bool(probe.missing("code")), reason="this machine has not all walls")
def test_the_reward_of_the_code_recipe_pays_only_code_that_passes_the_tests(monkeypatch):
    tests = ["assert add(1, 2) == 3", "assert set([add(1, 1)]) == set([2])"]
    with asking(runner(2)) as client, ThreadPoolExecutor(2) as pool:
        monkeypatch.setenv("RLFLOW_SERVICE_SANDBOX", client.url)
        scores = pool.map(lambda reply: passed(reply, tests, "import math"), REPLIES)
        assert list(scores) == list(REPLIES.values())
