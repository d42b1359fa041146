"""The record as a run of MLflow: in a folder, without a server or a database, or where MLFLOW_TRACKING_URI says."""

from __future__ import annotations

import json
import logging
import os
import posixpath
import re
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from samestep.errors import ConfigError
from samestep.record.images import safe_name
from samestep.record.source import STARTS

FOLDER: Final = "mlflow"
RUN_FILE: Final = "run-id"
EXPERIMENT: Final = "samestep"
STATUS: Final = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
MOST_METRICS: Final = 1000  # of one request
MOST_PARAMETERS: Final = 100
_TAKEN: Final = re.compile(r"(?![./])[\w\-. :/]{1,250}")
_VARIABLES: Final = {
    # its folder of files is frozen, not gone: what needs neither a server nor a database
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",  # MLflow would tell its makers of every use
}


class MlflowSink:
    """Writes parameters, metrics by step and time, images (as artifacts) and the status to one run of MLflow, kept over resumes.

    The run is in DIR/mlflow, or at MLFLOW_TRACKING_URI; in the experiment MLFLOW_EXPERIMENT_NAME,
    or samestep. MLflow takes nothing back: of steps that were made again it has the metrics twice,
    which are equal unless the job was changed. The same holds for events that are taken again, in a
    folder; a database drops them.
    """

    def __init__(self, directory: Path) -> None:
        """Continue the run of MLflow that belongs to the directory, or create it. Raises `ConfigError` without mlflow-skinny."""
        for name, value in _VARIABLES.items():
            os.environ.setdefault(name, value)
        try:
            from mlflow.entities import Metric, Param, RunTag
            from mlflow.tracking import MlflowClient
        except ImportError as error:
            raise ConfigError(
                'the sink mlflow needs its package: pip install "samestep[mlflow]"'
            ) from error
        self._metric, self._parameter, self._tag = Metric, Param, RunTag
        folder = directory / FOLDER
        folder.mkdir(exist_ok=True)
        self._client = MlflowClient(
            os.environ.get("MLFLOW_TRACKING_URI") or folder.resolve().as_uri()
        )
        run = self._open_run(folder / RUN_FILE, directory.resolve().name)
        self._run = run.info.run_id
        self._parameters: dict[str, str] = run.data.params
        self._names: dict[str, str] = {name: name for name in run.data.metrics}
        self._waiting: list[Any] = []

    def _open_run(self, file: Path, name: str) -> Any:
        from mlflow.exceptions import MlflowException

        if file.exists() and (known := file.read_text()):
            try:
                return self._client.get_run(known)
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
        there = self._client.get_experiment_by_name(experiment)
        run = self._client.create_run(
            there.experiment_id if there else self._client.create_experiment(experiment),
            run_name=name,
        )
        file.write_text(run.info.run_id)
        return run

    def take(self, event: Mapping[str, Any]) -> None:
        """Keep scalars for the next batch; write parameters and the status at once."""
        kind = event["event"]
        if kind == "scalars":
            self._take_scalars(event)
        elif kind in STARTS:
            self._take_config(event["config"])
            self._client.update_run(self._run, status="RUNNING")
        elif kind in STATUS:
            self.flush()
            self._client.set_terminated(self._run, STATUS[kind], end_time=_milliseconds(event))

    def image(self, event: Mapping[str, Any], data: bytes) -> None:
        """Write an image's file as it is, as an artifact in images/."""
        with TemporaryDirectory() as folder:
            file = Path(folder, Path(event["path"]).name)
            file.write_bytes(data)
            self._client.log_artifact(self._run, str(file), "images")

    def flush(self) -> None:
        """Write the metrics that wait."""
        while batch := self._waiting[:MOST_METRICS]:
            self._client.log_batch(self._run, metrics=batch)
            del self._waiting[: len(batch)]

    def close(self) -> None:
        """Write what waits."""
        self.flush()

    def _take_scalars(self, event: Mapping[str, Any]) -> None:
        if len(self._waiting) >= MOST_METRICS:
            self.flush()
        time, step = _milliseconds(event), event["step"]
        self._waiting += [
            self._metric(self._name(name), value, time, step)
            for name, value in event["values"].items()
        ]

    def _take_config(self, config: Mapping[str, Any]) -> None:
        """Write the options; those that another start gave differently become tags, since parameters never change."""
        texts = {
            name: value if isinstance(value, str) else json.dumps(value)
            for name, value in config.items()
        }
        new = [
            self._parameter(name, text)
            for name, text in texts.items()
            if name not in self._parameters
        ]
        for first in range(0, len(new), MOST_PARAMETERS):
            self._client.log_batch(self._run, params=new[first : first + MOST_PARAMETERS])
        self._parameters = {**texts, **self._parameters}
        changed = [
            self._tag(name, text) for name, text in texts.items() if self._parameters[name] != text
        ]
        if changed:
            self._client.log_batch(self._run, tags=changed)

    def _name(self, name: str) -> str:
        """Return the name that MLflow has for a scalar: the same one where it can be."""
        if name not in self._names:
            self._names[name] = self._new_name(name)
            if self._names[name] != name:
                logging.getLogger("samestep").warning(
                    "MLflow has the scalar %r as %r: it takes no such name", name, self._names[name]
                )
        return self._names[name]

    def _new_name(self, name: str) -> str:
        if _TAKEN.fullmatch(name) and posixpath.normpath(name) == name and self._is_free(name):
            return name
        # which no name is, so that it differs from all that MLflow takes as they are
        return safe_name(f"{name}/")

    def _is_free(self, name: str) -> bool:
        """Tell whether a name is no folder of others, nor below one of them: in a folder of files, a/b is a file in a."""
        return not any(
            f"{other}/".startswith(f"{name}/") or name.startswith(f"{other}/")
            for other in self._names.values()
        )


def _milliseconds(event: Mapping[str, Any]) -> int:
    return int(event["time"] * 1000)
