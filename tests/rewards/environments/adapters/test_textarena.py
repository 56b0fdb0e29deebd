"""Episodes of real TextArena games."""

from contextlib import closing

from rlflow.rewards.environments.adapters.textarena import Game
from rlflow.rewards.environments.environment_pool import EnvironmentPool, Failure
from rlflow.rewards.environments.environment_spec import parse_environment


def pool(**settings):
    return closing(
        EnvironmentPool(parse_environment("textarena:GuessTheNumber-v0", {"parallel": "1", **settings}))
    )


def test_a_game_is_played_to_its_end_and_gives_its_own_reward():
    spec = parse_environment("textarena:GuessTheNumber-v0", {})
    assert (str(spec), spec.library, spec.source.scores) == (
        "textarena:GuessTheNumber-v0(id='GuessTheNumber-v0'), at most 8 turns",
        "textarena",
        True,
    )
    game = Game(id="GuessTheNumber-v0")
    assert "guess the number between 1 and 20" in game.reset(seed=5)
    low, high = 1, 20
    while True:
        guess = (low + high) // 2
        turn = game.step(f"I say [{guess}].")
        if turn.done:
            break
        assert turn.says in ("\nThe target number is lower.\n", "\nThe target number is higher.\n"), (
            "it does not repeat the player's words"
        )
        low, high = (low, guess - 1) if "lower" in turn.says else (guess + 1, high)
    assert (turn.reward, turn.says, turn.log["invalid_move"]) == (1.0, "", 0.0)


def test_games_of_one_process_have_separate_randomness():
    """Blackjack deals a card at each hit."""
    alone, beside, other = (Game(id="Blackjack-v0") for _ in range(3))
    assert beside.reset(seed=3) == alone.reset(seed=3) != other.reset(seed=4)
    expected = [alone.step("[hit]").says for _ in range(4)]
    found = []
    for _ in range(4):
        other.step("[hit]")
        found.append(beside.step("[hit]").says)
    assert found == expected
    assert len(set(found)) > 2


def test_textarena_works_in_the_sandbox_and_by_messages():
    with pool(chat="true") as games:
        episodes, (opening,) = games.open([{}], [5])
        assert opening["says"][0]["role"] == "user"
        (answer,) = games.step(episodes, ["no number"])
        assert "invalid move" in answer["says"][0]["content"]
    with closing(
        EnvironmentPool(parse_environment("textarena:GuessTheNumbr-v0", {"parallel": "1"}))
    ) as games:
        _, (answer,) = games.open([{}], [0])
    assert isinstance(answer, Failure)
    assert "TextArena does not have a game 'GuessTheNumbr-v0'" in str(answer.reason)
