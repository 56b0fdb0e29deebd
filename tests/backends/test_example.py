"""The example backend of docs/backends.md meets the contract, and the page lists every declaration."""

import dataclasses
import re
from pathlib import Path

import contract
import pytest

from rlflow.author.load import load_flow
from rlflow.author.settings import fields
from rlflow.compiler.trace.compile import compile_flow
from rlflow.config.backend_names import setting_types
from rlflow.config.flags import sort_values
from rlflow.config.roles.bound import bind_roles, side_class
from rlflow.training import protocols

NAME = "example.rowwise"
HERE = Path(__file__).parent
PAGE = (HERE.parents[1] / "docs" / "backends.md").read_text()


def claims(pattern):
    """Return the contract's claims about the example whose names have this start."""
    return [claim for claim in contract.named(NAME, 1) if re.match(pattern, claim)]


def test_claims_about_a_trainer_of_one_shape_hold(checked, subtests):
    checked.check(subtests, NAME, 1, claims(r"Trainer: llama: "))


@pytest.mark.long
def test_the_example_meets_the_contract(checked, subtests):
    """Its code does not depend on shapes: the trainer runs two, and the generator, which recomputes each
    prompt for every token, one.
    """
    checked.check(subtests, NAME, 1, claims(r"Trainer: (?:llama|gemma3|reward)\b|Generator: llama\b"))


def test_the_page_shows_the_complete_backend():
    [shown] = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert shown == (HERE / "example" / "rowwise.py").read_text()


def test_the_page_names_every_declaration_of_a_backend():
    facts = [field.name for field in dataclasses.fields(protocols.Capabilities)]
    optional = {
        name: [member for member in vars(kind) if not member.startswith("_")]
        for name, kind in vars(protocols).items()
        if getattr(kind, "_is_runtime_protocol", False) and kind is not protocols.Declares
    }
    assert len(facts) > 15
    assert {"ForwardsAhead", "ShowsDestinations"} <= optional.keys()
    names = [*facts, *optional, *(member for members in optional.values() for member in members)]
    assert [name for name in names if not re.search(rf"`{name}\b", PAGE)] == []


def test_a_role_is_bound_to_the_example_with_its_declarations(folders):
    graph = compile_flow(load_flow("grpo")).graph
    values = {
        "model": str(folders["llama"]),
        "actor.trainer": NAME,
        "actor.generator": NAME,
        "actor.prefill": "64",
        "actor.lr": "1e-4",
    }
    actor = bind_roles(graph, sort_values(values, ["actor", "reference", "reward"]))["actor"]
    assert (actor.trainer.settings.lr, actor.generator.settings.prefill) == (1e-4, 64)
    assert (actor.trainer.can.row_exact, actor.trainer.offers(protocols.ShowsPieces)) == (True, True)
    assert (actor.trainer.can.threads, actor.trainer.can.movable) == (False, ("weights", "optimizer"))
    assert (actor.generator.offers(protocols.GivesChunks), actor.generator.can) == (
        False,
        protocols.Capabilities(),
    )


def test_check_reads_the_settings_of_the_example_from_its_source():
    types = {
        field.name: field.type
        for half in ("trainer", "generator")
        for field in fields(side_class(NAME, half).Settings).values()
    }
    assert setting_types(NAME)["prefill"] == types["prefill"]
