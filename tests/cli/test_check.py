"""`rlflow check` from a user's view, and the modules it loads."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from sources import TESTS

from rlflow.author.load import load_flow
from rlflow.cli.check import read_config, roles_of
from rlflow.cli.main import exit_code

FIXTURES = TESTS / "compiler" / "check" / "fixtures"


def command(capsys, *words):
    code, printed = exit_code(list(map(str, words))), capsys.readouterr()
    return code, printed.out + printed.err


@pytest.mark.parametrize(
    ("name", "code", "verdict"),
    [
        ("many", 2, "refused (9 nodes; 8 errors, 1 warning)"),
        ("never_read", 0, "ok (6 nodes; 1 warning)"),
        ("role_unused", 0, "ok (5 nodes; 1 note)"),
        ("variant_number", 2, "refused (7 nodes; 1 error)"),
    ],
)
def test_errors_exit_with_2_and_warnings_with_0(capsys, name, code, verdict):
    path = FIXTURES / f"{name}.py"
    ended, printed = command(capsys, "check", path)
    assert (ended, printed.splitlines()[-1]) == (code, f"{path}: {verdict}")


@pytest.mark.parametrize("name", ["two_flows", "no_flow", "file_raises"])
def test_a_file_without_one_flow_exits_with_2(capsys, name):
    ended, printed = command(capsys, "check", FIXTURES / f"{name}.py")
    assert ended == 2
    lines = (FIXTURES / f"{name}.py").read_text().splitlines()
    [meant] = [number for number, line in enumerate(lines, 1) if "# <- " in line]
    assert f"{name}.py:{meant}: the file" in printed
    assert "Traceback" not in printed


def test_one_of_two_flows_can_be_named(capsys):
    assert command(capsys, "check", f"{FIXTURES / 'two_flows.py'}::mistaken")[0] == 0
    ended, printed = command(capsys, "check", f"{FIXTURES / 'two_flows.py'}::mistakn")
    assert ended == 2
    assert "nearest:  mistaken" in printed


REFUSED = [
    'name = "../x"',
    f'name = "{"x" * 300}"',
    'pools = "x=1,,"',
    "[pools]\nall = -1",
    "[pools]\nall = 100000000",
    "staleness = 1",
    'pools = "train=1,rollout=1"\n[actor.generator]\npool = "elsewhere"',
    "hp.samples = 1000000000",
    "hp.max_tokens = 1000000000000",
    'out = "a\\u0000b"',
    "stream = 1000000000",
    "seed = -1",
    f"x = {'[' * 3000}",
    f"{'.'.join(['a'] * 1200)} = 1",
    f"seed = {'9' * 5000}",
    '[service.a]\nrun = "x"\ngpus = -1',
]


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: text[:40])
def test_check_refuses_what_a_run_refuses_before_loading(tmp_path, monkeypatch, capsys, text):
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(text)
    assert command(capsys, "check", "grpo", "--config", "run.toml")[0] == 2
    assert command(capsys, "run", "grpo", "--backend", "null", "--config", "run.toml")[0] == 2
    assert not Path("runs").exists()


def test_places_are_never_wrapped(tmp_path):
    folder = tmp_path / ("a_long_folder_name_" * 8)
    folder.mkdir()
    path = folder / "mistaken.py"
    path.write_text((FIXTURES / "many.py").read_text())
    environment = {**os.environ, "COLUMNS": "20", "TERM": "dumb"}
    words = [sys.executable, "-m", "rlflow.cli.main", "check", str(path)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 2
    assert (
        len(
            [
                line
                for line in done.stdout.splitlines()
                if line.startswith(str(path)) and re.search(r"\.py:\d+: ", line)
            ]
        )
        == 9
    )


def test_a_file_that_is_not_python_is_reported_with_its_line(tmp_path, capsys):
    path = tmp_path / "broken.py"
    path.write_text("def flow(:\n")
    ended, printed = command(capsys, "check", path)
    assert ended == 2
    assert printed.startswith(f"{path}:1: the file cannot be loaded: SyntaxError")


@pytest.mark.parametrize(
    "text", ["raise SystemExit(0)", "import sys; sys.exit('bye')", "1 / 0", "import no_such_package"]
)
def test_a_file_that_exits_while_loading_is_an_error_with_its_line(tmp_path, capsys, text):
    path = tmp_path / "stops.py"
    path.write_text(f"x = 1\n{text}\n")
    ended, printed = command(capsys, "check", path)
    assert ended == 2
    assert printed.startswith(f"{path}:2: the file cannot be loaded: ")


def test_a_missing_file_is_reported_with_the_nearest_name(capsys):
    ended, printed = command(capsys, "check", "pp0")
    assert ended == 2
    assert "nearest:  ppo" in printed
    assert "there is no algorithm file 'pp0'" in printed


def test_control_characters_of_a_file_do_not_reach_the_terminal(tmp_path, capsys):
    path = tmp_path / "loud.py"
    path.write_text('raise ValueError("\\x1b[31mred")\n')
    _, printed = command(capsys, "check", path)
    assert "\x1b" not in printed
    assert "\\x1b[31mred" in printed


DATA = {  # data → whether the reward's field is taken as given, or found in the data
    "org/problems:main/train": True,
    "folder": True,
    "problems.jsonl": False,
    "chain_sum": False,
}


@pytest.mark.parametrize("data", DATA)
def test_a_field_that_a_reward_reads_is_missing_only_if_the_fields_are_known(
    tmp_path, monkeypatch, capsys, data
):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("folder", "train.jsonl").write_text('{"prompt": "a", "tests": "b"}\n')
    Path("problems.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    Path("scorer.py").write_text("def passed(completion, tests):\n    return 1.0\n")
    words = ["--data", data, "--reward", "scorer.py:passed", "--backend", "null"]
    ended, printed = command(capsys, "check", "grpo", *words)
    assert ended == (0 if DATA[data] else 2), printed
    assert ("reward needs column 'tests'" in printed) is not DATA[data]


# -- loaded modules
# ------------------------------------------------------------------------------------------------------------

LOADED = """
import sys
{before}
print(sorted({{name.partition(".")[0] for name in sys.modules}} & {{"torch", "ray", "transformers", "datasets", "vllm"}}))
"""
CHECKED = """
from rlflow.cli.check import check_file
check_file({path!r}, [])
"""


def loaded(before):
    done = subprocess.run(
        [sys.executable, "-c", LOADED.format(before=before)], capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()[-1]


def test_importing_rlflow_loads_no_torch():
    assert loaded("import rlflow") == "[]"


def test_help_loads_no_torch():
    assert (
        loaded(
            "import rlflow.cli.main\nsys.argv = ['rlflow', '--help']\ntry: "
            "rlflow.cli.main.main()\nexcept SystemExit: pass"
        )
        == "[]"
    )


@pytest.mark.slow
def test_check_loads_only_torch_and_only_for_a_valid_file():
    assert loaded(CHECKED.format(path=str(FIXTURES / "never_read.py"))) == "['torch']"
    assert loaded(CHECKED.format(path=str(FIXTURES / "column_missing.py"))) == "[]"
    assert loaded(CHECKED.format(path=str(FIXTURES / "symbol_torch.py"))) == "['torch']"


def test_several_rewards_are_separate_roles():
    flow = load_flow("gdpo")
    rewards = {"reward": ("task", "math", "math@hard"), "eval": ("hard=x.jsonl",)}
    roles = roles_of(flow, ("task", "math"))
    assert len(roles) == len(roles_of(flow, ("task",))) + 1
    config = read_config(flow, {**rewards, f"{roles[-1]}.reward": "task"})
    assert config.options.reward == ("task", "math")
    assert config.judges == ("math@hard",)


# -- models that must know the tools
# -----------------------------------------------------------------------------------------

CALCULATOR = f"{TESTS / 'rewards' / 'environments' / 'calculator.py'}:Calculator"
CARRIES = (
    "{% if tools %}{{ tools }}<tool_call>{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% "
    "endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def model(tmp_path):
    """A function from a chat template to a model folder with it that has nothing to load."""

    def written(template):
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        return str(tmp_path)

    return written


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "does not describe tools"),
        (
            CARRIES.replace("{% for", "{{ messages | length }}{% for"),
            "changes earlier turns when later ones follow",
        ),
        (
            CARRIES.replace("m.content", "'' if m.role == 'tool' else m.content"),
            "does not write a tool's answer",
        ),
    ],
)
def test_a_model_without_a_tool_template_is_refused(capsys, model, template, says):
    ended, printed = command(capsys, "check", "grpo", "--env", CALCULATOR, "--model", model(template))
    assert ended == 2
    assert re.search(
        rf"^\S*calculator\.py:\d+: the chat template of \S* {says}\n  found: .*\n  expected: .*\n  remedy: ",
        printed,
        re.MULTILINE,
    )
    assert "grpo: refused (7 nodes; 1 error" in printed


def test_a_model_with_a_tool_template_passes(capsys, model):
    words = ("check", "grpo", "--env", CALCULATOR, "--model", model(CARRIES))
    assert command(capsys, *words)[0] == 0
    # which has no model
    assert command(capsys, "check", "grpo", "--env", CALCULATOR, "--backend", "null")[0] == 0


def test_without_a_model_the_packaged_one_is_checked_for_tools(capsys):
    ended, printed = command(capsys, "check", "grpo", "--env", CALCULATOR)
    assert ended == 2
    assert "the tokenizer of " in printed
    assert "arithmetic_model has none" in printed


@pytest.mark.slow
def test_a_model_without_a_tool_template_is_refused_early():
    path = str(FIXTURES / "never_read.py")  # a valid flow, for which torch would be loaded
    assert (
        loaded(f"from rlflow.cli.check import check_file\ncheck_file({path!r}, ['--env', {CALCULATOR!r}])")
        == "[]"
    )
