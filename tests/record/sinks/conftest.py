from __future__ import annotations

import pytest

from samestep.record import FileRecord
from tests.record.sinks.send_record import write_start


@pytest.fixture
def record(tmp_path):
    record = FileRecord(tmp_path)
    write_start(record, 0)
    yield record
    record.close()
