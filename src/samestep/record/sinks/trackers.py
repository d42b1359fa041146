"""The record as a run of an experiment tracker.

MLflow: in a folder without a server or database, or at a tracking URI. Weights & Biases: offline,
as files that `wandb sync` uploads. TensorBoard: event files, written by its own package, without
TensorFlow.
"""

from __future__ import annotations

import json
import logging
import os
import posixpath
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from samestep.errors import RecordError
from samestep.record.events import read_events
from samestep.record.images import safe_name
from samestep.record.sinks import package_error
from samestep.record.source import STARTS, STEP_EVENTS, open_source, step_position, valid_until
from samestep.storage import make_folder, read_regular

MLFLOW_FOLDER: Final = "mlflow"
RUN_FILE: Final = "run-id"
LONGEST_ID: Final = 1000  # bytes
EXPERIMENT: Final = "samestep"
STATUS: Final = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
MAX_METRICS: Final = 1000  # per request
MAX_PARAMETERS: Final = 100
_VALID_NAME: Final = re.compile(r"(?![./])[\w\-. :/]{1,250}")
_VARIABLES: Final = {
    # the file store is frozen but supported; it needs neither a server nor a database
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
WANDB_FOLDER: Final = "wandb"
STEP: Final = "step"
TENSORBOARD_FOLDER: Final = "tensorboard"
_EVENT_FILE: Final = "events.out.tfevents"
_SETTINGS: Final[dict[str, Any]] = {
    "mode": "offline",
    "silent": True,
    "console": "off",
    "disable_git": True,
    "save_code": False,
    "x_disable_machine_info": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
    "x_transaction_log_flush_interval": 1.0,  # seconds
}


class MlflowSink:
    """Writes parameters, metrics, images (as artifacts) and the status to one MLflow run.

    The run is in DIR/mlflow, or at MLFLOW_TRACKING_URI, in the experiment MLFLOW_EXPERIMENT_NAME or
    samestep. Resumes continue it. MLflow cannot delete metrics: repeated steps appear twice, with
    equal values unless the job changed. Events that are received again also appear twice in a
    folder; a database drops them.
    """

    def __init__(self, directory: Path) -> None:
        """Continue or create the run. Raises `ConfigError` without the package mlflow-skinny."""
        for name, value in _VARIABLES.items():
            os.environ.setdefault(name, value)
        try:
            from mlflow.entities import Metric, Param, RunTag
            from mlflow.tracking import MlflowClient
        except ImportError as error:
            raise package_error("mlflow") from error
        self._metric, self._parameter, self._tag = Metric, Param, RunTag
        folder = directory / MLFLOW_FOLDER
        make_folder(folder)
        uri = os.environ.get("MLFLOW_TRACKING_URI") or folder.resolve().as_uri()
        self._client = MlflowClient(uri)
        run = self._open_run(folder / RUN_FILE, directory.resolve().name)
        self._run = run.info.run_id
        self._parameters: dict[str, str] = run.data.params
        self._names: dict[str, str] = {name: name for name in run.data.metrics}
        self._pending: list[Any] = []

    def _open_run(self, file: Path, name: str) -> Any:
        from mlflow.exceptions import MlflowException

        if run_id := _saved_id(file):
            try:
                return self._client.get_run(run_id)
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
        title = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
        existing = self._client.get_experiment_by_name(title)
        experiment = existing.experiment_id if existing else self._client.create_experiment(title)
        run = self._client.create_run(experiment, run_name=name)
        file.write_text(run.info.run_id)
        return run

    def take(self, event: Mapping[str, Any]) -> None:
        """Add scalars to the next batch; write parameters and the status immediately."""
        kind = event["event"]
        if kind == "scalars":
            if len(self._pending) >= MAX_METRICS:
                self.flush()
            at = _milliseconds(event), event["step"]
            items = event["values"].items()
            self._pending += [self._metric(self._name(name), value, *at) for name, value in items]
        elif kind in STARTS:
            self._write_config(event["config"])
            self._client.update_run(self._run, status="RUNNING")
        elif kind in STATUS:
            self.flush()
            self._client.set_terminated(self._run, STATUS[kind], end_time=_milliseconds(event))

    def image(self, event: Mapping[str, Any], data: bytes) -> None:
        with TemporaryDirectory() as folder:
            file = Path(folder, Path(event["path"]).name)
            file.write_bytes(data)
            self._client.log_artifact(self._run, str(file), "images")

    def flush(self) -> None:
        while batch := self._pending[:MAX_METRICS]:
            self._client.log_batch(self._run, metrics=batch)
            del self._pending[: len(batch)]

    def close(self) -> None:
        self.flush()

    def _write_config(self, config: Mapping[str, Any]) -> None:
        """Write options as parameters; changed ones as tags, because parameters cannot change."""
        texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in config.items()}
        new = [self._parameter(*item) for item in texts.items() if item[0] not in self._parameters]
        for first in range(0, len(new), MAX_PARAMETERS):
            self._client.log_batch(self._run, params=new[first : first + MAX_PARAMETERS])
        self._parameters = {**texts, **self._parameters}
        changed = texts.items() - self._parameters.items()
        if changed:
            self._client.log_batch(self._run, tags=[self._tag(*item) for item in sorted(changed)])

    def _name(self, name: str) -> str:
        """Return the MLflow name of a scalar: the same if it is valid."""
        if name not in self._names:
            self._names[name] = self._new_name(name)
            if self._names[name] != name:
                message = "MLflow shows the scalar %r as %r, because it rejects the name"
                logging.getLogger("samestep").warning(message, name, self._names[name])
        return self._names[name]

    def _new_name(self, name: str) -> str:
        # in a folder, the metric a/b is a file in a, so a cannot be a metric as well
        is_free = not any(
            f"{other}/".startswith(f"{name}/") or name.startswith(f"{other}/")
            for other in self._names.values()
        )
        if is_free and _VALID_NAME.fullmatch(name) and posixpath.normpath(name) == name:
            return name
        return safe_name(f"{name}/")  # no valid name ends with a slash, so the result is unique


def _milliseconds(event: Mapping[str, Any]) -> int:
    return int(event["time"] * 1000)


class WandbSink:
    """Writes the configuration, scalars over the metric `step`, and images to DIR/wandb.

    Upload them with `wandb sync DIR/wandb/offline-run-*`. A resume continues the same run in new
    files. Nothing can be deleted: a step that is repeated, or received again, has two rows with the
    same `step`, which are equal unless the job changed. Rows are safe within a second of `flush`;
    the wandb service has no call for it.
    """

    def __init__(self, directory: Path) -> None:
        """Start the wandb service and the run. Raises `ConfigError` without the package wandb."""
        folder = directory / WANDB_FOLDER
        make_folder(folder)
        os.environ.setdefault("WANDB_CACHE_DIR", str(folder / "cache"))
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        try:
            import wandb
        except ImportError as error:
            raise package_error("wandb") from error
        self._wandb: Any = wandb
        available = wandb.Settings.model_fields
        settings = wandb.Settings(**{key: _SETTINGS[key] for key in _SETTINGS if key in available})
        wandb.setup(settings)
        self._run: Any = wandb.init(
            id=_run_id(folder / RUN_FILE),
            name=os.environ.get("WANDB_NAME") or directory.resolve().name,
            dir=str(directory),
            resume="allow",
            settings=settings,
        )
        self._run.define_metric("*", step_metric=STEP)
        self._renamed: set[str] = set()
        self._failed = False

    def take(self, event: Mapping[str, Any]) -> None:
        """Write the scalars or the configuration of an event."""
        kind = event["event"]
        if kind == "scalars":
            self._write(event, {self._name(name): value for name, value in event["values"].items()})
        elif kind in STARTS:
            self._run.config.update(dict(event["config"]), allow_val_change=True)
        self._failed = kind == "failed" or (self._failed and kind not in STARTS)

    def image(self, event: Mapping[str, Any], data: bytes) -> None:
        with TemporaryDirectory() as folder:
            file = Path(folder, "image.png")
            file.write_bytes(data)
            self._write(event, {self._name(event["name"]): self._wandb.Image(str(file))})

    def flush(self) -> None:
        """Do nothing: the service flushes every second."""

    def close(self) -> None:
        """End the wandb run, as failed if the run failed, and the service."""
        self._run.finish(exit_code=int(self._failed))
        self._wandb.teardown()

    def _write(self, event: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        self._run.log({**values, STEP: event["step"], "_timestamp": event["time"]})

    def _name(self, name: str) -> str:
        """Return the wandb name of a scalar or an image, which differs only for reserved names."""
        if name != STEP and not name.startswith("_"):
            return name
        if name not in self._renamed:
            self._renamed.add(name)
            message = "wandb shows %r as %r, because the name is reserved"
            logging.getLogger("samestep").warning(message, name, f"metric/{name}")
        return f"metric/{name}"


def _saved_id(file: Path) -> str:
    return read_regular(file, LONGEST_ID).decode() if os.path.lexists(file) else ""


def _run_id(file: Path) -> str:
    if run_id := _saved_id(file):
        return run_id
    new = secrets.token_hex(8)
    file.write_text(new)
    return new


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
        self._writer = record_writer.RecordWriter(
            _next_file(directory / TENSORBOARD_FOLDER).open("xb")
        )
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
        events: list[dict[str, Any]] = []
        for event in read_events(self._directory):
            kind = event.get("event")
            if kind in STARTS:
                events = [each for each in events if step_position(each) <= valid_until(event)]
            if (kind, event.get("time")) == (until["event"], until["time"]):
                break
            if kind in STEP_EVENTS and event.get("step") == step:
                events.append(event)
        return events

    def _write_config(self, event: Mapping[str, Any]) -> None:
        config = {
            name: value if isinstance(value, bool | int | float | str) else json.dumps(value)
            for name, value in event["config"].items()
        }
        texts = {name: str(value).replace("|", r"\|") for name, value in config.items()}
        rows = [f"| {name} | {text} |".replace("\n", " ") for name, text in texts.items()]
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
    make_folder(folder)
    suffixes = [path.suffix[1:] for path in folder.glob(f"{_EVENT_FILE}.*")]
    last = max((int(suffix) for suffix in suffixes if re.fullmatch(r"\d+", suffix)), default=0)
    return folder / f"{_EVENT_FILE}.{last + 1:010d}"
