from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from samestep.watch import table
from samestep.watch.table import Table

CHANGES = st.lists(
    st.integers(1, 5).map(lambda count: ("append", count))
    | st.integers(0, 9).map(lambda last: ("keep", last)),
    max_size=20,
)


@given(CHANGES, st.integers(1, 4))
def test_it_holds_what_was_appended_and_not_struck_out(changes, at_a_time):
    before, table.ROWS_AT_A_TIME = table.ROWS_AT_A_TIME, at_a_time
    try:
        found, expected, seen = Table(np.float64, np.int32), [], []
        for what, number in changes:
            if what == "append":
                rows = [(len(expected) + row, row) for row in range(number)]
                expected += rows
                for row in rows:
                    found.append(row)
            else:
                expected = [row for row in expected if row[0] <= number]
                found.keep(found.columns()[0] <= number)
            seen.append((found.columns(), [*expected]))
            assert len(found) == len(expected)
    finally:
        table.ROWS_AT_A_TIME = before
    for columns, rows in seen:  # what was returned once stays as it was
        assert list(zip(*(column.tolist() for column in columns), strict=True)) == rows
