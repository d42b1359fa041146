"""The arrays of orders in a record: small, written once, and checked when they are read."""

from __future__ import annotations

import numpy as np
import pytest

from samestep.data.plan import array_digest
from samestep.errors import RecordError
from samestep.record import orders
from samestep.record.orders import read_order, write_order


@pytest.mark.parametrize(
    "array",
    [np.arange(1000), np.array([-1, 2**62]), np.array([0.1, 1.5]), np.array([7]), np.zeros(3, int)],
    ids=["indices", "any", "floats", "one", "zeros"],
)
def test_an_array_is_read_as_it_was(array, tmp_path):
    digest = array_digest(array)
    assert write_order(tmp_path, array, digest)
    (file,) = tmp_path.glob("record/*")
    before = file.stat().st_mtime_ns
    assert write_order(tmp_path, array, digest)
    assert file.stat().st_mtime_ns == before
    again = read_order(tmp_path, digest)
    assert again.dtype == array.dtype
    assert again.tolist() == array.tolist()


def test_small_numbers_take_a_byte_each(tmp_path):
    array = np.arange(10_000) % 200
    write_order(tmp_path, array, "a")
    (file,) = tmp_path.glob("record/*")
    assert file.stat().st_size < 10_200


def test_no_more_than_the_limit_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(orders, "ORDER_BYTES", 400)
    assert write_order(tmp_path, np.arange(200), "a")
    assert not write_order(tmp_path, np.arange(200) // 2, "b")
    assert write_order(tmp_path, np.arange(3), "c")


def test_a_disk_that_fails_is_an_error(tmp_path):
    (tmp_path / "record").write_text("a file")
    with pytest.raises(RecordError, match=r"cannot write .*order-a\.bin"):
        write_order(tmp_path, np.arange(3), "a")
    with pytest.raises(RecordError, match="cannot read the order of samples"):
        read_order(tmp_path, "a")
