"""The record as TensorBoard's event files, written by its own package: no TensorFlow, no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from samestep.errors import ConfigError, RecordError
from samestep.record.events import read_events
from samestep.record.source import OF_A_STEP, STARTS, last_standing, open_source, place_of

FOLDER: Final = "tensorboard"
_FILE: Final = "events.out.tfevents"


class TensorBoardSink:
    """Writes scalars, images (their files as they are) and the configuration to DIR/tensorboard, for `tensorboard --logdir DIR`.

    TensorBoard keeps scalars as 32-bit floats. Where steps come again (a run that was taken up
    again, or events that are taken a second time), the start of a session tells readers to forget
    what they know of them.
    """

    def __init__(self, directory: Path) -> None:
        """Begin a file beside those of earlier processes. Raises `ConfigError` without the package tensorboard."""
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2  # type: ignore[import-untyped]
            from tensorboard.plugins.hparams.summary_v2 import hparams_pb  # type: ignore[import-untyped]
            from tensorboard.plugins.text.metadata import create_summary_metadata  # type: ignore[import-untyped]
            from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]
        except ImportError as error:
            raise ConfigError(
                'the sink tensorboard needs its package: pip install "samestep[tensorboard]"'
            ) from error
        self._event, self._summary, self._tensor, self._types = (
            event_pb2,
            summary_pb2,
            tensor_pb2,
            types_pb2,
        )
        self._hparams, self._text = hparams_pb, create_summary_metadata
        self._directory = directory
        self._writer = RecordWriter(_next_file(directory / FOLDER).open("xb"))
        self._writer.write(event_pb2.Event(file_version="brain.Event:2").SerializeToString())
        self._in_session = False

    def take(self, event: Mapping[str, Any]) -> None:
        """Write the scalars or the configuration of an event; nothing else has a place in TensorBoard."""
        kind = event["event"]
        if kind in STARTS or (kind in OF_A_STEP and not self._in_session):
            self._start_session(event)
        if kind in STARTS:
            self._write_config(event)
        elif kind == "scalars":
            self._write_scalars(event)

    def image(self, event: Mapping[str, Any], data: bytes) -> None:
        """Write an image's file as it is."""
        image = self._summary.Summary.Image(
            height=event["height"], width=event["width"], encoded_image_string=data
        )
        self._write(event, self._summary.Summary.Value(tag=event["name"], image=image))

    def flush(self) -> None:
        """Hand all that was written to the operating system."""
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()

    def _start_session(self, event: Mapping[str, Any]) -> None:
        """Have readers forget all from the step of an event on, and tell again what stands of that very step."""
        step = 0 if event["event"] == "started" else event["step"]
        log = self._event.SessionLog(status=self._event.SessionLog.START)
        self._writer.write(
            self._event.Event(
                wall_time=event["time"], step=step, session_log=log
            ).SerializeToString()
        )
        self._in_session = True
        for earlier in _standing(self._directory, step, event):
            if earlier["event"] == "scalars":
                self._write_scalars(earlier)
            elif earlier["event"] == "image":
                with suppress(RecordError):  # its file was removed since
                    self.image(earlier, open_source(self._directory).read_image(earlier["path"]))

    def _write_config(self, event: Mapping[str, Any]) -> None:
        config = {
            name: value if isinstance(value, bool | int | float | str) else json.dumps(value)
            for name, value in event["config"].items()
        }
        table = "\n".join(
            [
                "| option | value |",
                "| --- | --- |",
                *(f"| {name} | {_cell(value)} |" for name, value in config.items()),
            ]
        )
        text = self._tensor.TensorProto(dtype=self._types.DT_STRING, string_val=[table.encode()])
        self._write(
            event,
            self._summary.Summary.Value(
                tag="config", tensor=text, metadata=self._text("config", "")
            ),
        )
        self._write(event, *self._hparams(config, start_time_secs=event["time"]).value)

    def _write_scalars(self, event: Mapping[str, Any]) -> None:
        self._write(
            event,
            *(
                self._summary.Summary.Value(tag=name, simple_value=value)
                for name, value in event["values"].items()
            ),
        )

    def _write(self, event: Mapping[str, Any], *values: Any) -> None:
        summary = self._summary.Summary(value=values)
        self._writer.write(
            self._event.Event(
                wall_time=event["time"], step=event["step"], summary=summary
            ).SerializeToString()
        )


def _next_file(folder: Path) -> Path:
    """Return a new file's path; readers go through files in the order of their names."""
    folder.mkdir(exist_ok=True)
    numbers = [
        int(path.suffix[1:])
        for path in folder.glob(f"{_FILE}.*")
        if re.fullmatch(r"\.\d+", path.suffix)
    ]
    return folder / f"{_FILE}.{max(numbers, default=0) + 1:010d}"


def _standing(directory: Path, step: int, until: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what the record tells of a step before the event `until`, without what a start made void."""
    found: list[dict[str, Any]] = []
    for event in read_events(directory):
        kind = event.get("event")
        if kind in STARTS:
            found = [earlier for earlier in found if place_of(earlier) <= last_standing(event)]
        if (kind, event.get("time")) == (until["event"], until["time"]):
            break
        if kind in OF_A_STEP and event.get("step") == step:
            found.append(event)
    return found


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
