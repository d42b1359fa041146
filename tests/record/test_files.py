from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from samestep.record.files import (
    EventChunk,
    chunk_at,
    covered_end,
    find_chunks,
    redundant_chunks,
)

PARTS = st.lists(
    st.tuples(st.integers(0, 9), st.integers(1, 5)).map(
        lambda pair: EventChunk(pair[0], pair[0] + pair[1])
    ),
    max_size=8,
)


def names(parts):
    return {part.path.removeprefix("record/"): part.end - part.start for part in parts}


@given(PARTS)
def test_parts_are_known_by_their_names(parts):
    assert find_chunks(names(parts)) == sorted(set(parts))


def test_what_is_no_whole_part_counts_for_nothing():
    whole = names([EventChunk(3, 8)])
    torn = dict.fromkeys(names([EventChunk(3, 9)]), 4)
    others = {
        "lock": 0,
        "cursor.json": 9,
        f"{5:020d}-{3:020d}.jsonl": -2,
        f"{3:020d}-{3:020d}.jsonl": 0,
        "0-5.jsonl": 5,
        "": 1,
    }
    assert find_chunks({**others, **torn, **whole}) == [EventChunk(3, 8)]


@given(PARTS)
def test_all_up_to_where_parts_reach_can_be_read_from_them(parts):
    position = 0
    while (part := chunk_at(position, parts)) is not None:
        assert part.start <= position < part.end
        position = part.end
    assert position == covered_end(parts)
    assert all(chunk_at(byte, parts) for byte in range(position))


@given(PARTS)
def test_without_the_superfluous_ones_the_same_bytes_are_there(parts):
    left = redundant_chunks(parts)
    needed = [part for part in set(parts) if part not in left]

    def bytes_of(some):
        return {byte for part in some for byte in range(part.start, part.end)}

    assert bytes_of(needed) == bytes_of(parts)
    assert redundant_chunks(needed) == []
