from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipes.atari.config import GameSettings, ReplaySettings
from recipes.atari.replay import PrioritizedReplay, Replay
from recipes.settings import SettingsError
from tests.jobs import fingerprint

ENVIRONMENTS, SIZE = 2, 3
SETTINGS = ReplaySettings(steps=3, discount=0.5)
KINDS = [Replay, PrioritizedReplay]


class All:
    """Chooses every sample once, in order."""

    def _choose(self, size, correction):
        rows = torch.tensor(self._drawable(), dtype=torch.int64)
        return (
            rows.repeat_interleave(ENVIRONMENTS),
            torch.arange(ENVIRONMENTS).repeat(len(rows)),
            torch.ones(size),
        )


class AllOfReplay(All, Replay):
    pass


def filled(kind, rows, steps, *, game=None, settings=SETTINGS, end_rate=0.2):
    """Return a replay after some steps, and its whole history.

    That is [steps + 1] frames, and [steps] of actions, rewards and ends.
    """
    game = game or GameSettings(frame_size=SIZE, frame_stack=3)
    replay = kind(settings, game, rows, ENVIRONMENTS)
    frames = torch.randint(256, (steps + 1, ENVIRONMENTS, SIZE, SIZE), dtype=torch.uint8)
    actions, rewards = (
        torch.randint(6, (steps, ENVIRONMENTS)),
        torch.randint(-1, 2, (steps, ENVIRONMENTS)).float(),
    )
    ends = torch.rand(steps, ENVIRONMENTS) < end_rate
    replay.begin_row(frames[0])
    for step in range(steps):
        replay.complete_row(actions[step], rewards[step], ends[step])
        replay.begin_row(frames[step + 1])
    return replay, (frames, actions, rewards, ends)


def stack_at(frames, ends, row, column, stack):
    """Return an observation as its definition says it, frame by frame."""
    starts = [0] + [step + 1 for step in range(row) if ends[step, column]]
    return torch.stack(
        [frames[max(row - back, starts[-1]), column] for back in reversed(range(stack))]
    )


@given(
    rows=st.integers(7, 20),
    steps=st.integers(0, 50),
    stack=st.integers(1, 3),
    ahead=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
def test_samples_are_what_was_played(rows, steps, stack, ahead, seed):
    torch.manual_seed(seed)
    game, settings = (
        GameSettings(frame_size=SIZE, frame_stack=stack),
        replace(SETTINGS, steps=ahead),
    )
    replay, (frames, actions, rewards, ends) = filled(
        AllOfReplay, rows, steps, game=game, settings=settings
    )
    oldest = max(0, steps + 1 - rows)
    among = range(oldest + stack - 1 if oldest else 0, steps + 1 - ahead)
    assert replay.ready() == (len(among) > 0)

    drawn = replay.draw(len(among) * ENVIRONMENTS, 1.0) if among else []
    for index, (observation, action, gain, after, discount, *_) in enumerate(
        zip(*drawn[:-1], strict=True)
    ):
        row, column = among[index // ENVIRONMENTS], index % ENVIRONMENTS
        assert torch.equal(observation, stack_at(frames, ends, row, column, stack))
        assert action == actions[row, column]
        last = next((step for step in range(row, row + ahead) if ends[step, column]), None)
        path = range(row, row + ahead if last is None else last + 1)
        assert gain == sum(0.5**number * rewards[step, column] for number, step in enumerate(path))
        assert discount == (0.5**ahead if last is None else 0)
        if last is None:
            assert torch.equal(after, stack_at(frames, ends, row + ahead, column, stack))

    newest = torch.stack(
        [stack_at(frames, ends, steps, column, stack) for column in range(ENVIRONMENTS)]
    )
    assert torch.equal(replay.newest(), newest)


@pytest.mark.parametrize("kind", KINDS)
@given(rows=st.integers(7, 12), steps=st.integers(4, 30), seed=st.integers(0, 2**32))
def test_a_replay_goes_on_where_its_state_was_taken(kind, rows, steps, seed):
    torch.manual_seed(seed)
    replay, _ = filled(kind, rows, steps)
    *_, report_errors = replay.draw(3, 0.5)
    report_errors(torch.rand(3) * 5)
    other, _ = filled(kind, rows, 5)
    other.load_state_dict(replay.state_dict())

    def then(replay):
        torch.manual_seed(seed)
        for _ in range(3):
            replay.complete_row(
                torch.ones(ENVIRONMENTS), torch.ones(ENVIRONMENTS), torch.zeros(ENVIRONMENTS)
            )
            replay.begin_row(torch.zeros(ENVIRONMENTS, SIZE, SIZE))
        return fingerprint(replay.draw(9, 0.5)[:-1]), fingerprint(replay.state_dict())

    assert then(other) == then(replay)


@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_holds_a_frame_once(kind):
    replay, _ = filled(kind, 7, 30)
    assert replay.state_dict()["frames"].shape == (7, ENVIRONMENTS, SIZE, SIZE)
    replay, _ = filled(kind, 20, 4)
    assert replay.state_dict()["frames"].shape == (5, ENVIRONMENTS, SIZE, SIZE)


def test_a_replay_of_another_size_is_not_taken():
    state = filled(Replay, 8, 3)[0].state_dict()
    for other in (
        filled(Replay, 9, 3)[0],
        filled(Replay, 8, 0, game=GameSettings(frame_size=SIZE, frame_stack=2))[0],
    ):
        if other.rows == 8:
            other.load_state_dict(state)  # the stack is put together from the same frames
            continue
        with pytest.raises(
            SettingsError, match=r"the snapshot's replay must have 9 rows .* got 8 of"
        ):
            other.load_state_dict(state)


def test_a_replay_that_is_too_small_to_draw_from_is_an_error():
    with pytest.raises(
        SettingsError, match=r"must have at least 7 steps per game, got 6 with replay\.size="
    ):
        filled(Replay, 6, 0)


# Priorities


def test_samples_are_drawn_in_proportion_to_their_priority():
    torch.manual_seed(0)
    replay, _ = filled(PrioritizedReplay, 7, 40, settings=replace(SETTINGS, priority_exponent=2.0))
    rows = list(replay._drawable())
    errors = torch.arange(1.0, len(rows) * ENVIRONMENTS + 1)
    for row, error in zip(rows, errors.view(-1, ENVIRONMENTS), strict=True):
        replay._take_errors(torch.full((ENVIRONMENTS,), row), torch.arange(ENVIRONMENTS), error)

    chosen_rows, columns, weights = replay._choose(40_000, correction=0.5)

    index = (chosen_rows - rows[0]) * ENVIRONMENTS + columns
    torch.testing.assert_close(
        index.bincount() / len(index), errors**2 / (errors**2).sum(), atol=0.01, rtol=0.05
    )
    # (probability / the least)^-0.5
    torch.testing.assert_close(weights, 1 / errors[index], atol=0, rtol=1e-4)


def test_a_new_sample_counts_as_the_largest_error_so_far():
    torch.manual_seed(0)
    replay, _ = filled(PrioritizedReplay, 7, 10, settings=replace(SETTINGS, priority_exponent=1.0))
    replay._take_errors(torch.tensor([8]), torch.tensor([0]), torch.tensor([50.0]))
    replay._take_errors(torch.tensor([8]), torch.tensor([0]), torch.tensor([0.0]))
    replay.complete_row(
        torch.zeros(ENVIRONMENTS), torch.zeros(ENVIRONMENTS), torch.zeros(ENVIRONMENTS)
    )
    assert replay._priorities[10 % 7].tolist() == pytest.approx([50.0, 50.0])
    assert replay._priorities[8 % 7, 0] > 0  # what was learned well may still be drawn


def test_errors_mean_nothing_where_all_are_drawn_alike():
    torch.manual_seed(0)
    replay, _ = filled(Replay, 7, 10)
    *_, weights, report_errors = replay.draw(5, 0.4)
    before = fingerprint(replay.state_dict())
    report_errors(torch.rand(5))
    assert torch.equal(weights, torch.ones(5))
    assert fingerprint(replay.state_dict()) == before
