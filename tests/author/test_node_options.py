"""The settings of a node and their display in a graph."""

import pytest

from rlflow.author.node_options import GenerateOptions, NodeOptions, UpdateOptions, plain


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (NodeOptions(), {}),
        (GenerateOptions(2, 8), {"samples": 2, "max_tokens": 8, "top_k": 0, "stop": ()}),
        (
            GenerateOptions(2, 8, 0, 1, lengths=(3, 4), environment="a.py:A()"),
            {
                "samples": 2,
                "max_tokens": 8,
                "temperature": 0,
                "top_p": 1,
                "top_k": 0,
                "stop": (),
                "lengths": "(3, 4)",
                "environment": "a.py:A()",
            },
        ),
        (
            UpdateOptions(own=(("clip", 0.2),)),
            {"epochs": 1, "minibatch": None, "mean": "tokens", "clip": 0.2},
        ),
        (
            UpdateOptions(scale=(1.0, 2.0), where=(None, "right"), losses=("a", "b")),
            {
                "epochs": 1,
                "minibatch": None,
                "mean": "tokens",
                "scale": "(1.0, 2.0)",
                "where": "(None, 'right')",
                "losses": ("a", "b"),
            },
        ),
    ],
)
def test_default_settings_are_not_shown(options, shown):
    assert dict(options.shown) == shown
    assert [name for name, _ in options.shown] == list(shown)


def test_values_without_a_wire_form_are_shown_as_text():
    assert (plain(2**70), plain(-5), plain(["a"]), plain((1, "a")), plain(max)) == (
        str(2**70),
        -5,
        ("a",),
        "(1, 'a')",
        "max",
    )
