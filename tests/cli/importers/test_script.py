"""The importer finds the command of a script and fills in its variables, in any form of the script."""

import pytest

from rlflow.cli.importers.script import arguments, value

PROGRAMS = ("verl.trainer.main_ppo",)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("python3 -m verl.trainer.main_ppo a=1 b='x y'\n", ["a=1", "b=x y"]),
        (
            "python3 verl/trainer/main_ppo.py \\\n  a=1 \\\n  # b=2 \\\n  c=3 $@ 2>&1 | tee log\n",
            ["a=1", "c=3"],
        ),
        (
            'N=4\nexport M="$N/x"\npython -m verl.trainer.main_ppo n=$N m=${M} k=${K:-7} o=$O && echo done\n',
            ["n=4", "m=4/x", "k=7", "o=$O"],
        ),
        ("echo don't\npython -m verl.trainer.main_ppo a=1\nexit 0\n", ["a=1"]),
        ("python -m verl.trainer.main_sft a=1\n", None),
    ],
)
def test_the_trainer_command_is_found(text, words):
    assert arguments(text, PROGRAMS, "run.sh") == words


def test_text_is_read_as_number_bool_list_or_text():
    assert [value(text) for text in ("1", "1e-6", "True", "null", "['a', 2]", "'a b'", "-1.5")] == [
        1,
        1e-6,
        True,
        None,
        ["a", 2],
        "a b",
        -1.5,
    ]
