"""A run's record: events as lines of an append-only file, with scalars, timing and images."""

from samestep.record.events import read_events
from samestep.record.record import FileRecord, NoRecord, Record, open_record
from samestep.record.source import read_history

__all__ = ["FileRecord", "NoRecord", "Record", "open_record", "read_events", "read_history"]
