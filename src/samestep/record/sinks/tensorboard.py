"""The record as TensorBoard's event files, written by its own package: no TensorFlow, no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from samestep.errors import RecordError
from samestep.record.events import read_events
from samestep.record.sinks import package_error
from samestep.record.source import STARTS, STEP_EVENTS, open_source, step_position, valid_until

FOLDER: Final = "tensorboard"
_FILE: Final = "events.out.tfevents"


class TensorBoardSink:
    """Writes scalars, images and the configuration to DIR/tensorboard.

    View them with `tensorboard --logdir DIR`. TensorBoard stores scalars as 32-bit floats. If steps
    are repeated (the run resumed, or events are received again), the start of a session makes
    readers discard the earlier ones.
    """

    def __init__(self, directory: Path) -> None:
        """Create a new file. Raises `ConfigError` without the package tensorboard."""
        try:
            from tensorboard.compat.proto import (  # type: ignore[import-untyped]
                event_pb2,
                summary_pb2,
                tensor_pb2,
            )
            from tensorboard.plugins.hparams import summary_v2  # type: ignore[import-untyped]
            from tensorboard.plugins.text import metadata  # type: ignore[import-untyped]
            from tensorboard.summary.writer import record_writer  # type: ignore[import-untyped]
        except ImportError as error:
            raise package_error("tensorboard") from error
        self._events, self._summary = event_pb2, summary_pb2.Summary
        self._tensor, self._hparams = tensor_pb2.TensorProto, summary_v2.hparams_pb
        self._text = metadata.create_summary_metadata
        self._directory = directory
        self._writer = record_writer.RecordWriter(_next_file(directory / FOLDER).open("xb"))
        self._writer.write(event_pb2.Event(file_version="brain.Event:2").SerializeToString())
        self._in_session = False

    def take(self, event: Mapping[str, Any]) -> None:
        """Write an event's scalars or configuration; TensorBoard cannot show other events."""
        kind = event["event"]
        if kind in STARTS or (kind in STEP_EVENTS and not self._in_session):
            self._start_session(event)
        if kind in STARTS:
            self._write_config(event)
        elif kind == "scalars":
            self._write_scalars(event)

    def image(self, event: Mapping[str, Any], data: bytes) -> None:
        size = {"height": event["height"], "width": event["width"]}
        image = self._summary.Image(encoded_image_string=data, **size)
        self._write_values(event, self._summary.Value(tag=event["name"], image=image))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _start_session(self, event: Mapping[str, Any]) -> None:
        """Make readers discard everything from the event's step on; rewrite its valid events."""
        step = 0 if event["event"] == "started" else event["step"]
        log = self._events.SessionLog(status=self._events.SessionLog.START)
        self._write(event["time"], step, session_log=log)
        self._in_session = True
        for earlier in self._valid_events(step, event):
            if earlier["event"] == "scalars":
                self._write_scalars(earlier)
            elif earlier["event"] == "image":
                with suppress(RecordError):  # the file was removed
                    self.image(earlier, open_source(self._directory).read_image(earlier["path"]))

    def _valid_events(self, step: int, until: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the events of a step before the event `until`, without superseded ones."""
        found: list[dict[str, Any]] = []
        for event in read_events(self._directory):
            kind = event.get("event")
            if kind in STARTS:
                found = [each for each in found if step_position(each) <= valid_until(event)]
            if (kind, event.get("time")) == (until["event"], until["time"]):
                break
            if kind in STEP_EVENTS and event.get("step") == step:
                found.append(event)
        return found

    def _write_config(self, event: Mapping[str, Any]) -> None:
        config = {
            name: value if isinstance(value, bool | int | float | str) else json.dumps(value)
            for name, value in event["config"].items()
        }
        rows = [f"| {name} | {_escape(value)} |" for name, value in config.items()]
        table = "\n".join(["| option | value |", "| --- | --- |", *rows])
        text = self._tensor(dtype="DT_STRING", string_val=[table.encode()])
        metadata = self._text("config", "")
        value = self._summary.Value(tag="config", tensor=text, metadata=metadata)
        self._write_values(event, value)
        self._write_values(event, *self._hparams(config, start_time_secs=event["time"]).value)

    def _write_scalars(self, event: Mapping[str, Any]) -> None:
        items = event["values"].items()
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in items]
        self._write_values(event, *values)

    def _write_values(self, event: Mapping[str, Any], *values: Any) -> None:
        self._write(event["time"], event["step"], summary=self._summary(value=values))

    def _write(self, time: float, step: int, **content: Any) -> None:
        event = self._events.Event(wall_time=time, step=step, **content)
        self._writer.write(event.SerializeToString())


def _next_file(folder: Path) -> Path:
    """Return the path of a new file that sorts last, because readers sort files by name."""
    folder.mkdir(exist_ok=True)
    suffixes = [path.suffix[1:] for path in folder.glob(f"{_FILE}.*")]
    last = max((int(suffix) for suffix in suffixes if re.fullmatch(r"\d+", suffix)), default=0)
    return folder / f"{_FILE}.{last + 1:010d}"


def _escape(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
