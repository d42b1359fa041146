"""The record as an offline run of Weights & Biases: files that `wandb sync` uploads."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from samestep.record.sinks import package_error
from samestep.record.source import STARTS

FOLDER: Final = "wandb"
RUN_FILE: Final = "run-id"
STEP: Final = "step"
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


class WandbSink:
    """Writes the configuration, scalars over the metric `step`, and images to DIR/wandb.

    Upload them with `wandb sync DIR/wandb/offline-run-*`. A resume continues the same run in new
    files. Nothing can be deleted: a step that is repeated, or received again, has two rows with the
    same `step`, which are equal unless the job changed. Rows are safe within a second of `flush`;
    the wandb service has no call for it.
    """

    def __init__(self, directory: Path) -> None:
        """Start the wandb service and the run. Raises `ConfigError` without the package wandb."""
        folder = directory / FOLDER
        folder.mkdir(exist_ok=True)
        os.environ.setdefault("WANDB_CACHE_DIR", str(folder / "cache"))
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        try:
            import wandb
        except ImportError as error:
            raise package_error("wandb") from error
        self._wandb: Any = wandb
        known = wandb.Settings.model_fields
        settings = wandb.Settings(**{key: _SETTINGS[key] for key in _SETTINGS if key in known})
        wandb.setup(settings)
        self._run: Any = wandb.init(
            id=_run_id(folder / RUN_FILE),
            name=os.environ.get("WANDB_NAME") or directory.resolve().name,
            dir=directory,
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


def _run_id(file: Path) -> str:
    if file.exists() and (known := file.read_text()):
        return known
    new = secrets.token_hex(8)
    file.write_text(new)
    return new
