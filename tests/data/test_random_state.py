from __future__ import annotations

import itertools
import random
from contextlib import suppress

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from samestep.data.random_state import generators_restored, key, keyed, set_generators

WORDS = st.text(st.characters(codec="utf-8", exclude_characters=","), max_size=5)


def draws():
    """Draw from every generator that user code may draw from."""
    return (
        random.random(),
        random.randrange(10**9),
        np.random.rand(),
        np.random.permutation(9).tolist(),
        torch.rand(5).tolist(),
    )


@given(st.integers(0, 2**63 - 1))
def test_set_generators_equals_the_usual_seeding_calls(value):
    set_generators(value)
    ours = draws()
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.manual_seed(value)
    assert ours == draws()


def test_keyed_depends_only_on_the_key_and_restores_states():
    with keyed(1):
        inner = draws()
    set_generators(5)
    draws()
    with keyed(9):
        undisturbed = [draws(), draws(), draws()]
    expected = draws()

    set_generators(5)
    draws()
    with keyed(9):
        first = draws()
        with keyed(1):
            assert draws() == inner
        second = draws()
        with suppress(KeyError), keyed(1):
            draws()
            raise KeyError
        assert [first, second, draws()] == undisturbed
    assert draws() == expected


def test_states_saved_once_serve_several_parts():
    alone = []
    for value in (1, 2, 3):
        with keyed(value):
            alone.append(draws())
    set_generators(5)
    expected = [draws(), draws()]

    set_generators(5)
    assert draws() == expected[0]
    with suppress(KeyError), generators_restored():
        for value in (3, 1):
            set_generators(value)
            assert draws() == alone[value - 1]
        with keyed(2):
            assert draws() == alone[1]
        raise KeyError
    assert draws() == expected[1]


def test_the_users_bit_generator_is_restored():
    original, chosen = np.random.get_bit_generator(), np.random.PCG64(3)
    expected = np.random.RandomState(np.random.PCG64(3)).rand(2)
    np.random.set_bit_generator(chosen)
    try:
        first = np.random.rand()
        with keyed(1):
            np.random.rand()
        assert [first, np.random.rand()] == expected.tolist()
        assert np.random.get_bit_generator() is chosen
    finally:
        np.random.set_bit_generator(original)


def test_a_cached_normal_variate_is_restored():
    """`random.gauss` and `torch.randn` cache the second of two variates."""

    def after(disturb):
        set_generators(3)
        random.gauss(0, 1), np.random.standard_normal(), torch.randn(3)
        disturb()
        return random.gauss(0, 1), np.random.standard_normal(), torch.randn(3).tolist()

    def disturb():
        with keyed(4):
            random.gauss(0, 1), np.random.standard_normal(), torch.randn(1)

    assert after(disturb) == after(lambda: None)


@given(
    st.lists(
        st.tuples(st.integers(0, 2**63 - 1), WORDS, st.lists(st.integers(0, 2**40), max_size=4)),
        max_size=20,
    )
)
def test_different_arguments_give_different_keys(calls):
    distinct = {(seed, scope, *numbers) for seed, scope, numbers in calls}
    keys = {key(*arguments) for arguments in distinct}
    assert len(keys) == len(distinct)
    assert all(0 <= number < 2**63 for number in keys)


def test_keys_are_the_same_in_every_process():
    assert key(0, "lane", 1, 2, 3) == 4751062233746214219
    near = itertools.product(range(3), ["lane", "fetch"], range(3), range(3))
    assert len({key(*arguments) for arguments in near}) == 3 * 2 * 3 * 3
