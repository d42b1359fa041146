"""The record as a run of Weights & Biases in its offline mode: files, which `wandb sync` uploads when somebody wants it."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from samestep.errors import ConfigError
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
    """Writes the configuration, scalars over the metric `step`, and images to DIR/wandb: `wandb sync DIR/wandb/offline-run-*` uploads it.

    A resume continues the same run of Weights & Biases in files of its own. Nothing is taken back
    there: of steps that were made again, or taken a second time, it has two rows with one `step`,
    equal unless the job was changed. Rows are safe within a second of a `flush`, which its service
    cannot be asked for.
    """

    def __init__(self, directory: Path) -> None:
        """Start the service of wandb, and the part of the run that this process writes. Raises `ConfigError` without wandb."""
        folder = directory / FOLDER
        folder.mkdir(exist_ok=True)
        os.environ.setdefault("WANDB_CACHE_DIR", str(folder / "cache"))
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                'the sink wandb needs its package: pip install "samestep[wandb]"'
            ) from error
        self._wandb: Any = wandb
        settings = wandb.Settings(
            **{
                name: value
                for name, value in _SETTINGS.items()
                if name in wandb.Settings.model_fields
            }
        )
        wandb.setup(settings)
        name = os.environ.get("WANDB_NAME") or directory.resolve().name
        self._run: Any = wandb.init(
            id=_run_id(folder / RUN_FILE),
            name=name,
            dir=directory,
            resume="allow",
            settings=settings,
        )
        self._run.define_metric("*", step_metric=STEP)
        self._told: set[str] = set()
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
        """Write an image's file as it is."""
        with TemporaryDirectory() as folder:
            file = Path(folder, "image.png")
            file.write_bytes(data)
            self._write(event, {self._name(event["name"]): self._wandb.Image(str(file))})

    def flush(self) -> None:
        """Do nothing: the service writes each second what it has."""

    def close(self) -> None:
        """End the run of wandb, as failed where the run has, and the service."""
        self._run.finish(exit_code=int(self._failed))
        self._wandb.teardown()

    def _write(self, event: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        self._run.log({**values, STEP: event["step"], "_timestamp": event["time"]})

    def _name(self, name: str) -> str:
        """Return the name that wandb has for a scalar or an image: the same, but for those with a meaning there."""
        if name != STEP and not name.startswith("_"):
            return name
        if name not in self._told:
            self._told.add(name)
            logging.getLogger("samestep").warning(
                "wandb has %r as %r: the name has a meaning there", name, f"metric/{name}"
            )
        return f"metric/{name}"


def _run_id(file: Path) -> str:
    """Return the id that is kept in a file, or a new one that is kept there from now on."""
    if file.exists() and (known := file.read_text()):
        return known
    new = secrets.token_hex(8)
    file.write_text(new)
    return new
