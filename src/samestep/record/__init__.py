"""A run's record: written by one worker, sent to sinks, and read even while it is written."""

from samestep.record.events import read_events
from samestep.record.record import FileRecord, Record, open_record
from samestep.record.source import read_history

__all__ = ["FileRecord", "Record", "open_record", "read_events", "read_history"]
