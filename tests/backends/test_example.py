"""The backend that docs/backends.md shows does what the contract promises of every backend, and the page
names what can be declared."""

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
    """Those that the contract makes of it, of which the name begins so."""
    return [claim for claim in contract.named(NAME, 1) if re.match(pattern, claim)]


def test_what_is_claimed_of_a_trainer_of_one_shape_holds(judged, subtests):
    judged.hold(subtests, NAME, 1, claims(r"Trainer: llama: "))


@pytest.mark.long
def test_it_does_what_the_contract_promises(judged, subtests):
    """It knows no shapes: a trainer of two, and the generator, which computes each row's prompt anew for each
    token, of one."""
    judged.hold(subtests, NAME, 1, claims(r"Trainer: (?:llama|gemma3|reward)\b|Generator: llama\b"))


def test_the_page_shows_the_whole_backend():
    [shown] = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
    assert shown == (HERE / "example" / "rowwise.py").read_text()


def test_the_page_names_everything_that_a_backend_can_say_of_itself():
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


def test_a_role_is_bound_to_it_with_what_it_declares(folders):
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


def test_check_reads_its_settings_from_the_source():
    types = {
        field.name: field.type
        for half in ("trainer", "generator")
        for field in fields(side_class(NAME, half).Settings).values()
    }
    assert setting_types(NAME)["prefill"] == types["prefill"]
