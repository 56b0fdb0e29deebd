"""A script is read without being executed: literals are settings, and everything else is named with its line."""

import re

import pytest

from rlflow.cli.importers import trl
from rlflow.cli.importers.trl_script import Unread, read
from rlflow.errors import PlanError

HEAD = "from trl import GRPOConfig, GRPOTrainer\nfrom peft import LoraConfig\n"


def settings(body, name="train.py"):
    return read(HEAD + body, name)


def test_literals_and_variables_assigned_once_are_read():
    found = settings("""
LENGTH: int = 64
again = 1
again = 2
more = dict(beta=0.1, top_k=5)
config = GRPOConfig("out", max_completion_length=LENGTH, num_generations=again, epsilon=get(), **more)
config.seed = 7
GRPOTrainer("m", "judge/model", config, peft_config=None)
""")
    assert {key: value for key, value in found.items() if not isinstance(value, Unread)} == {
        "output_dir": "out",
        "max_completion_length": 64,
        "beta": 0.1,
        "top_k": 5,
        "seed": 7,
        "model": "m",
        "reward_funcs": ["judge/model"],
    }
    assert {key: (each.text, each.line) for key, each in found.items() if isinstance(each, Unread)} == {
        "num_generations": ("again", 8),
        "epsilon": ("get()", 8),
    }


def test_values_that_are_not_literals_are_named_with_their_line():
    found = trl.imported(settings("GRPOTrainer(model=args.model, args=GRPOConfig(learning_rate=args.lr))"))
    assert [line for line in found.by_hand if "line 3" in line] == [
        (
            "learning_rate = args.lr (line 3): its value is known only when the script runs; this file has "
            "TRL's default, 1e-06"
        ),
        "model = args.model (line 3): its value is known only when the script runs",
    ]
    assert "# by hand: learning_rate = args.lr (line 3)" in found.toml("run.toml")


def test_arguments_from_the_command_line_lead_to_the_yaml():
    found = settings("GRPOTrainer(model='m', args=training_args)")
    assert "import the YAML of --config" in str(found["args"])


@pytest.mark.parametrize(
    ("body", "data"),
    [
        ("data = load_dataset('a/b', split='train')", "a/b/train"),
        ("data = load_dataset('a/b', 'main')['test']", "a/b:main/test"),
        ("data = load_dataset('a/b', name='x', split='train')", "a/b:x/train"),
        ("data = load_dataset('a/b', split='train').map(f)", None),
        ("data = load_dataset('a/b')\ndata = data.map(f)", None),
        ("data = load_dataset(name)", None),
    ],
)
def test_a_data_set_is_read_if_the_script_does_not_change_it(body, data):
    found = settings(f"{body}\nGRPOTrainer(model='m', train_dataset=data)")["train_dataset"]
    assert (None if isinstance(found, Unread) else found) == data
    assert data or "for --data" in str(found)


FUNCTION = "async def own(completions, **kwargs):\n    return [0.0] * len(completions)\n"
MAIN = "GRPOTrainer(model='m', reward_funcs=own)"


@pytest.mark.parametrize(
    ("body", "reward"),
    [
        (f"{FUNCTION}def main():\n    {MAIN}", "train.py:own"),
        (f"import re\nP = re.compile('a')\n{FUNCTION}if __name__ == '__main__':\n    {MAIN}", "train.py:own"),
        (f"{FUNCTION}{MAIN}", "importing the file executes line 5"),
        (f"{FUNCTION}open('x', 'w')\ndef main():\n    {MAIN}", "importing the file executes line 5"),
        (f"def main():\n    def own(completions): ...\n    {MAIN}", "at the top level of a file"),
        ("from trl.rewards import accuracy_reward as own\n" + MAIN, "math"),
        ("from trl.rewards import think_format_reward as own\n" + MAIN, "a function of TRL"),
        ("from near import real as own\n" + MAIN, "near.py:real"),
        ("from far import own\n" + MAIN, "at the top level of a file"),
    ],
)
def test_a_function_is_a_reward_if_importing_its_file_does_nothing_else(body, reward, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "near.py").write_text("")
    (found,) = settings(body)["reward_funcs"]
    assert found == reward if not isinstance(found, Unread) else reward in str(found)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("def f(:", "is not valid Python"),
        ("SFTTrainer(model='m')", "builds no GRPOTrainer.*found: +SFTTrainer"),
        ("GRPOTrainer(a)\nGRPOTrainer(b)", "builds several GRPOTrainers"),
        ("GRPOTrainer(args=GRPOConfig())\nGRPOConfig()", "builds several GRPOConfigs"),
    ],
)
def test_a_script_without_one_trainer_is_refused(text, why):
    with pytest.raises(PlanError) as caught:
        read(text, "train.py")
    assert re.search(why, str(caught.value), re.DOTALL)


def test_an_adapter_that_is_not_in_the_script_is_named():
    found = settings("GRPOTrainer(model='m', peft_config=get_peft_config(args))")
    assert "set --lora RANK" in str(found["peft_config"])
    assert settings("GRPOTrainer(model='m', peft_config=LoraConfig(lora_alpha=4))")["peft_config.r"] == 8
