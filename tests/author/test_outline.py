"""The outline of a flow equals the loaded flow, and is absent where the text does not tell."""

import pytest

from rlflow.author.load import algorithms_folder, load_flow
from rlflow.author.outline import outline
from rlflow.compiler.trace.arguments import role_names
from rlflow.compiler.trace.compile import sampling_roles

FILES = sorted(path for path in algorithms_folder().glob("*.py") if path.stem != "__init__")


def test_outlines_of_the_installed_algorithms_equal_their_flows():
    told = {path: found for path in FILES if (found := outline(path)) is not None}
    assert len(told) >= 0.9 * len(FILES)
    for path, found in told.items():
        flow = load_flow(path.stem)
        assert (*found.roles, *filter(None, [found.rest])) == tuple(role_names(flow, 1)), path
        assert found.own == tuple(vars(flow.parameters.hp) if flow.parameters.hp is not None else ()), path
        assert set(sampling_roles(flow)) <= set(found.sampling), path


@pytest.mark.parametrize(
    "text",
    [
        "from other import HP\n@flow\ndef f(prompts, actor, hp=HP()): ...",
        "class HP(Other):\n    a: int = 1\n@flow\ndef f(prompts, actor, hp=HP()): ...",
        "@flow\ndef f(prompts, actor): ...\n@flow\ndef g(prompts, actor): ...",
        "@flow(keeps=1)\ndef f(prompts, actor): ...",
        "@flow(keeps=lambda hp: made(hp))\ndef f(prompts, actor): ...",
        "@flow(keeps=lambda hp: {'seen': made(hp)})\ndef f(prompts, actor, seen): ...",
        "@flow(keeps=lambda hp: {**made(hp)})\ndef f(prompts, actor): ...",
        "@wrapped\n@flow\ndef f(prompts, actor): ...",
        "from other import f",
        "def broken(",
    ],
)
def test_where_the_text_does_not_tell_there_is_no_outline(tmp_path, text):
    (tmp_path / "a.py").write_text(text)
    assert outline(tmp_path / "a.py") is None


def test_what_a_flow_keeps_is_no_role_unless_it_follows_one(tmp_path):
    text = "@flow(keeps=lambda hp: {'seen': table(wins=0.0), 'anchor': follow('actor'), 'past': buffer(rows=1)})\n"
    (tmp_path / "a.py").write_text(f"{text}def f(prompts, actor, anchor, seen, past): ...")
    assert outline(tmp_path / "a.py").roles == ("actor", "anchor")


def test_a_named_flow_is_chosen(tmp_path):
    (tmp_path / "a.py").write_text(
        "@flow\ndef f(p, actor, *rewards): ...\n@flow()\ndef g(p, solver, *, judge): solver.generate(p)"
    )
    found = outline(tmp_path / "a.py", "g")
    assert (found.roles, found.rest, found.own, found.sampling) == (
        ("solver", "judge"),
        None,
        (),
        ("solver",),
    )
    assert outline(tmp_path / "a.py", "f").rest == "rewards"
