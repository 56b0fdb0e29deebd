"""Prompts that a plan computes once for all their rows."""

import rlflow.data.tasks

MODEL = f"{next(iter(rlflow.data.tasks.__path__))}/arithmetic_model"
GRPO = f"grpo --model {MODEL} --prompts 4 --hp.samples 8 --hp.max_tokens 50 --data.max_prompt 100"


def sharing(explanation):
    return next(note.what for note in explanation.notes if note.name == "share")


def test_rows_share_their_prompt_in_forwards_and_updates(planned_as):
    found = planned_as(GRPO)
    names = ["actor.logprobs", "actor.update"]
    assert sharing(found) == "; ".join(f"{name} computes a prompt once for 8 rows" for name in names)
    assert found.as_json()["packed"] == [
        {"node": name, "tokens": 32 * 150, "computed": 4 * 100 + 32 * 50} for name in names
    ]


def test_nothing_is_shared_without_packing(planned_as):
    for words in (f"{GRPO} --actor.packed false", "grpo --prompts 4"):
        found = planned_as(words)
        assert sharing(found) == "no trainer has rows that share prompts"
        assert found.as_json()["packed"] == []


def test_each_role_shares_by_its_own_setting(planned_as):
    of_roles = sharing(planned_as(f"ppo --model {MODEL} --hp.samples 2 --critic.packed false"))
    assert "critic" not in of_roles
    assert "actor.update computes a prompt once for 2 rows" in of_roles
    assert "for 2 rows" in sharing(planned_as(f"dpo --model {MODEL}"))


def test_a_single_row_per_prompt_shares_nothing(planned_as):
    assert planned_as(f"sft --model {MODEL}").packed == ()
