from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.atari.config import GameSettings
from recipes.atari.game import Game
from recipes.settings import SettingsError
from tests.jobs import fingerprint

SMALL = GameSettings(frame_size=36)
GAMES = {
    "fires": SMALL,
    "does not fire": GameSettings(name="FreewayNoFrameskip-v4", frame_size=36, no_ops=5),
}


def played(game, actions):
    """Return all that is seen of a game while it is played on, also beyond its end."""
    seen = []
    for number, action in enumerate(actions):
        moment = game.play(action)
        seen.append(moment._replace(frame=fingerprint(moment.frame)))
        if moment.over:
            seen.append(fingerprint(game.start(number)))
    return seen, game.points


@pytest.fixture(scope="module", params=GAMES)
def games(request):
    """Return two machines."""
    return [Game(GAMES[request.param]) for _ in range(2)]


@pytest.fixture(scope="module")
def game():
    return Game(SMALL)


@settings(max_examples=5)
@given(before=st.integers(0, 150), seed=st.integers(0, 2**31))
def test_a_game_goes_on_where_its_state_was_taken(games, before, seed):
    game, other = games
    game.start(seed)
    played(game, torch.randint(game.actions, (before,)).tolist())
    state = game.state_dict()
    after = torch.randint(game.actions, (60,)).tolist()
    expected = played(game, after)

    other.start(seed + 1)  # somewhere else, which must not show
    other.load_state_dict(state)
    assert played(other, after) == expected
    assert fingerprint(other.state_dict()) == fingerprint(game.state_dict())


def test_a_game_depends_on_its_seed_alone(game):
    def start_and_play(seed):
        return fingerprint(game.start(seed)), played(
            game, [index % game.actions for index in range(40)]
        )

    first = [start_and_play(seed) for seed in range(4)]
    assert [start_and_play(seed) for seed in range(4)] == first
    assert len({str(outcome) for outcome in first}) > 1  # as many as there are numbers of no-ops


def test_points_and_lives_are_counted_to_the_end_of_a_game(game):
    torch.manual_seed(0)
    game.start(0)
    moments = [game.play(int(torch.randint(game.actions, ())))]
    while not moments[-1].over:
        moments.append(game.play(int(torch.randint(game.actions, ()))))

    assert game.points == sum(moment.points for moment in moments) > 0
    assert sum(moment.lost for moment in moments) == 3  # Space Invaders has three lives
    assert moments[-1].lost
    assert {moment.frame.shape for moment in moments} == {(36, 36)}


@pytest.mark.filterwarnings("ignore:.*(out of date|legacy).*")
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("NopeNoFrameskip-v4", ".*Nope"),
        ("ALE/Pong-v5", ".*[Ff]rame"),
        ("CartPole-v1", ":"),
        ("PongNoFrameskip-v0", ""),
    ],
)
def test_what_is_no_such_game_is_an_error(name, reason):
    with pytest.raises(SettingsError, match=rf"game\.name must be a game .*, got {name}{reason}"):
        Game(GameSettings(name=name))
