"""Arguments for tracing a flow's function, and its exceptions."""

from rlflow.author.flow import flow
from rlflow.compiler.trace.arguments import arguments, raised, role_names


@flow
def plain(prompts, actor, critic, hp=None):
    pass


@flow
def several(prompts, actor, *rewards):
    pass


def called(subject, count):
    """Return the function's own parameters as the arguments bind them."""
    positional, named = arguments(subject, str.upper, "settings", count)
    return positional, named


def test_roles_and_settings_are_passed_by_name():
    assert called(plain, 2) == ([], {"actor": "ACTOR", "critic": "CRITIC", "hp": "settings"})


def test_parameters_before_several_rewards_are_positional():
    assert called(several, 2) == (["ACTOR", "REWARDS_0", "REWARDS_1"], {})
    assert called(several, 0) == ([], {"actor": "ACTOR"})
    assert role_names(several, 2) == {"actor": ["actor"], "rewards": ["rewards_0", "rewards_1"]}


def test_a_problem_names_the_last_line_of_the_users_file():
    def inner():
        raise KeyError("nothing")

    try:
        inner()
    except KeyError as error:
        problem = raised(plain, error)
    assert problem.place.path == __file__
    assert problem.place.line == inner.__code__.co_firstlineno + 1
    assert "KeyError" in problem.message


def test_a_problem_without_a_user_frame_names_the_flow():
    assert raised(plain, ValueError("elsewhere")).place == plain.place


def test_a_role_and_one_of_several_never_share_a_name():
    @flow
    def both(prompts, actor, rewards_1, *rewards):
        pass

    assert role_names(both, 3)["rewards"] == ["rewards_0", "rewards_1_", "rewards_2"]
