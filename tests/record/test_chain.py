from __future__ import annotations

import hashlib
import os
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.errors import RecordError
from samestep.record.chain import EVENT, FILE, HEAD_BYTES, ROW_BYTES, Chain, ChainFile, origin
from samestep.record.events import FILE_NAME, EventFile
from tests.faults import cut, flip_byte, full_disk

SEED = 7
STEPS = 9


def parts(step, changed=-1):
    """Return four digests of a step; those of a step that is `changed` are others."""
    return tuple(
        hashlib.sha256(bytes([step, number, step == changed])).digest()[:8] for number in range(4)
    )


def write(directory, start=0, stop=STEPS, head=None, changed=-1):
    """Write the rows [start, stop); return the head after them."""
    file = ChainFile(directory, start, SEED, origin(SEED) if head is None else head)
    for step in range(start, stop):
        file.append(parts(step, changed))
    file.sync()
    file.close()
    return file.head


def consume(calls):
    for _ in calls:
        pass


def check(directory):
    with closing(Chain.open(directory)) as chain:
        chain.check()
        return len(chain)


def record(directory, *events):
    file = EventFile(directory / FILE_NAME)
    for kind, step, fields in events:
        file.append({"event": kind, "step": step, **fields})
    file.close()


def test_a_head_covers_what_its_docstring_says(tmp_path):
    write(tmp_path)
    content, head = (tmp_path / FILE).read_bytes(), origin(SEED)
    assert content[24:32] == SEED.to_bytes(8, "little")
    with closing(Chain.open(tmp_path)) as chain:
        assert (len(chain), chain.first, chain.start) == (STEPS, 0, head)
        for step in range(STEPS):
            numbers = step.to_bytes(8, "little") + SEED.to_bytes(8, "little")
            head = hashlib.sha256(head + numbers + b"".join(parts(step))).digest()
            assert chain[step] == (head, *parts(step))
            assert chain.head_after(step + 1) == head
        for step in (-1, STEPS, STEPS + 1):
            with pytest.raises(IndexError, match=f"has 0 to {STEPS - 1}, not step {step}"):
                chain[step]


def test_a_row_is_one_read(tmp_path, monkeypatch):
    write(tmp_path)
    sizes, pread = [], os.pread

    def note(file, size, place):
        sizes.append(size)
        return pread(file, size, place)

    with closing(Chain.open(tmp_path)) as chain:
        monkeypatch.setattr(os, "pread", note)
        chain[STEPS - 1]
    assert sizes == [ROW_BYTES]


@given(kills=st.lists(st.tuples(st.integers(0, STEPS), st.integers(0, ROW_BYTES - 1))))
def test_a_run_that_is_killed_and_resumes_writes_the_same_bytes(tmp_path_factory, kills):
    whole, killed = (tmp_path_factory.mktemp(name) for name in ("whole", "killed"))
    write(whole)
    start, head = 0, origin(SEED)
    for stop, torn in kills:  # each start resumes from the step of the kill, or an earlier one
        write(killed, start, max(start, stop), head)
        with (killed / FILE).open("ab") as file:
            file.write(bytes(torn))
        with closing(Chain.open(killed)) as chain:
            start = min(start, stop)
            head = chain.head_after(start)
    write(killed, start, STEPS, head)
    assert (killed / FILE).read_bytes() == (whole / FILE).read_bytes()
    assert check(killed) == STEPS


def exchange(path):
    content = path.read_bytes()
    first, second = content[128:192], content[192:256]
    path.write_bytes(content[:128] + second + first + content[256:])


def relink(path):
    """Write a valid chain with another row; only what the record says tells."""
    path.unlink()
    write(path.parents[1], changed=4)


@pytest.mark.parametrize(
    ("tamper", "found"),
    [
        *(
            pytest.param(
                lambda path, at=at: flip_byte(path, 64 + 3 * ROW_BYTES + at),
                "step 3 does not follow",
                id=f"byte {at} of row 3",
            )
            for at in (0, HEAD_BYTES - 1, HEAD_BYTES, 40, 48, 56, ROW_BYTES - 1)
        ),
        (exchange, "step 1 does not follow"),
        (lambda path: flip_byte(path, 40), "step 0 does not follow"),  # the head before it
        (lambda path: flip_byte(path, 24), "step 0 does not follow"),  # the seed
        (lambda path: flip_byte(path, 23), "no run writes that"),
        (lambda path: cut(path, 64 + 5 * ROW_BYTES), "step 5 is missing, but the record has"),
        (lambda path: cut(path, 64 + 5 * ROW_BYTES + 9), "step 5 has 9 of 64 bytes"),
        (relink, "step 5 has another head than the record"),
        (lambda path: flip_byte(path, 0), "must begin with"),
        (lambda path: flip_byte(path, 8), "must have format 1, got"),
        (lambda path: cut(path, 63), "must begin with"),
        (lambda path: path.write_bytes(b""), "must begin with"),
        (lambda path: path.unlink(), "cannot read a chain at"),
    ],
)
def test_tampering_is_found(tmp_path, tamper, found):
    write(tmp_path)
    with closing(Chain.open(tmp_path)) as chain:
        heads = {steps: chain.head_after(steps).hex() for steps in (0, 6, STEPS)}
    events = [(EVENT, steps, {"chain": head}) for steps, head in heads.items()]
    record(tmp_path, ("started", 0, {}), *events)
    assert check(tmp_path) == STEPS
    tamper(tmp_path / FILE)
    with pytest.raises(RecordError, match=found):
        check(tmp_path)


def test_snapshots_that_a_start_has_replaced_do_not_count(tmp_path):
    head = write(tmp_path)
    write(tmp_path, 0, 4)
    again, wrong = {"continues": True}, {"chain": "0" * 64}
    record(tmp_path, ("started", 0, {}), (EVENT, STEPS, {"chain": head.hex()}), (EVENT, 3, wrong))
    with pytest.raises(RecordError, match=r"step 2 has another head|step 4 is missing"):
        check(tmp_path)
    record(tmp_path, ("resumed", 2, again))
    assert check(tmp_path) == 4
    record(tmp_path, (EVENT, 3, wrong), ("started", 0, {}))
    assert check(tmp_path) == 4


def test_a_run_from_elsewhere_continues_the_head_of_its_snapshot(tmp_path):
    """A file of another history gets another name, as its rows could not be written again."""
    head = write(tmp_path, changed=2)
    write(tmp_path, STEPS, STEPS + 2, origin(3))
    assert check(tmp_path) == 2
    with closing(Chain.open(tmp_path)) as chain:
        assert (chain.first, chain.start, chain.head_after(STEPS)) == (STEPS, *2 * [origin(3)])
        with pytest.raises(IndexError, match="has 9 to 10, not step 8"):
            chain[STEPS - 1]
    earlier = tmp_path / f"{FILE}.earlier"
    assert earlier.stat().st_size == 64 + STEPS * ROW_BYTES
    earlier.replace(tmp_path / FILE)
    with closing(Chain.open(tmp_path)) as chain:
        assert chain.head_after(STEPS) == head


def test_a_full_disk_is_named(tmp_path):
    with full_disk(1 << 16) as folder:
        file = ChainFile(folder, 0, SEED, origin(SEED))
        with pytest.raises(RecordError, match=r"chain\.bin.*(No space|disk full)"):
            consume(file.append(parts(step % 256)) for step in range(2000))
        file.close()
    (tmp_path / "record").touch()
    with pytest.raises(RecordError, match="cannot write a record"):
        write(tmp_path)
