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
def test_chunks_are_found_by_name(parts):
    assert find_chunks(names(parts)) == sorted(set(parts))


def test_incomplete_chunks_and_other_files_are_ignored():
    complete = names([EventChunk(3, 8)])
    torn = dict.fromkeys(names([EventChunk(3, 9)]), 4)
    others = {
        "lock": 0,
        "cursor.json": 9,
        f"{5:020d}-{3:020d}.jsonl": -2,
        f"{3:020d}-{3:020d}.jsonl": 0,
        "0-5.jsonl": 5,
        "": 1,
    }
    assert find_chunks({**others, **torn, **complete}) == [EventChunk(3, 8)]


@given(PARTS)
def test_every_byte_before_covered_end_is_in_a_chunk(parts):
    position = 0
    while (part := chunk_at(position, parts)) is not None:
        assert part.start <= position < part.end
        position = part.end
    assert position == covered_end(parts)
    assert all(chunk_at(byte, parts) for byte in range(position))


@given(PARTS)
def test_removing_redundant_chunks_loses_no_bytes(parts):
    left = redundant_chunks(parts)
    needed = [part for part in set(parts) if part not in left]

    def bytes_of(chunks):
        return {byte for chunk in chunks for byte in range(chunk.start, chunk.end)}

    assert bytes_of(needed) == bytes_of(parts)
    assert redundant_chunks(needed) == []
