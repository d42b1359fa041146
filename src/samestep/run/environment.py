"""What the results of a run depend on: its program, versions, devices and inputs."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from samestep.config import Config, is_url
from samestep.errors import ConfigError
from samestep.host import printable
from samestep.masking import mask, mask_words
from samestep.record.events import FORMAT, samestep_version
from samestep.run.process import announce
from samestep.user_code import imported_modules

HASH_SEED: Final = "hash seed"  # of an environment
KEEP_SEED: Final = "to keep it, start with PYTHONHASHSEED={} (samestep run sets it to 0)"
COMMIT_SECONDS: Final = 1.0  # for git, which may have to look at many files
FILE: Final = "file "  # begins names of files in an environment
ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")  # of an object, another one at every start


def environment_of_results(config: Config, devices: list[torch.device]) -> dict[str, str]:
    """Return what the bits of a run depend on, besides its program, data, lanes and seed."""
    names = [
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"cpu {torch.backends.cpu.get_cpu_capability()}"
        for device in devices
    ]
    cudnn = torch.backends.cudnn
    environment: dict[str, object] = {
        "samestep": samestep_version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": cudnn.version() if devices[0].type == "cuda" else None,
        "numpy": np.__version__,
        "devices": ", ".join(dict.fromkeys(names)),
        "threads": config.threads,
        "precision": config.precision,
        "exchange dtype": config.exchange_dtype,
        "default dtype": torch.get_default_dtype(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "TF32 in convolutions": cudnn.allow_tf32 if devices[0].type == "cuda" else None,
        # torch's own mode, which a run turns on only for GPUs: its kernels for CPUs need none
        "deterministic kernels": torch.are_deterministic_algorithms_enabled()
        or (False if devices[0].type == "cuda" else None),
        "oneDNN": torch.backends.mkldnn.enabled,
        "assertions": __debug__,  # python -O removes them
        # the order of a set of strings; a random one differs in every process
        HASH_SEED: os.environ.get("PYTHONHASHSEED", "random")
        if sys.flags.hash_randomization
        else "0",
    }
    return {name: str(value) for name, value in environment.items()}


class ProgramFiles:
    """The script and the modules that it imports from its own folder, each of which is read once.

    For `python -m`, that is the folder of its package. Modules may be imported while it runs.
    """

    def __init__(self) -> None:
        self._digests: dict[str, str] = {}
        self._modules = 0  # that were imported at the last look
        main = sys.modules["__main__"]
        script, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
        self._script = None if script is None else Path(script).resolve()  # None in a notebook
        self._folder = Path() if self._script is None else self._script.parent
        if spec is not None and "." in spec.name:
            self._folder = self._folder.parents[spec.name.count(".") - 1]

    def digests(self) -> dict[str, str]:
        """Return a digest of each file that was imported, or is expected, by its name."""
        if self._script is not None and len(sys.modules) != self._modules:
            self._modules = len(sys.modules)
            for path in sorted({self._script, *imported_modules.files_in(self._folder)}):
                name = f"{FILE}{os.path.relpath(path, self._folder)}"
                if name not in self._digests and (digest := self._digest_of(name)):
                    self._digests[name] = digest
            imported_modules.note()
        return dict(self._digests)

    def expect(self, names: Iterable[str]) -> None:
        """Add files that may be imported later, as they were before; "no file" if missing."""
        if self._script is not None:
            for name in names:
                if name.startswith(FILE) and name not in self._digests:
                    self._digests[name] = self._digest_of(name) or "no file"

    def _digest_of(self, name: str) -> str:
        try:
            content = (self._folder / name.removeprefix(FILE)).read_bytes()
        except OSError:
            return ""
        return hashlib.sha256(content).hexdigest()[:12]


def inputs_of_program(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return `settings` by their names, or else the arguments of the script, without secrets.

    The same settings may be written as other arguments.
    """
    # arguments of a notebook are its kernel's, others at each start
    has_arguments = hasattr(sys.modules["__main__"], "__file__") and not settings
    inputs = {"arguments": shlex.join(mask_words(sys.argv[1:]))} if has_arguments else {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                add(f"{name}.{key}" if name else key, inner)
        else:
            inputs[f"setting {name}"] = ADDRESS.sub("", str(value))

    add("", mask(settings))
    return inputs


def differences(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """Return what differs as lines `name: old -> new`; "" if nothing does."""
    changed = [name for name in new if name in old and old[name] != new[name]]
    return "\n".join(f"  {name}: {printable(str(old[name]))} -> {new[name]}" for name in changed)


def warn_of_workers(workers: Sequence[Mapping[str, Any]]) -> None:
    """Warn if the environment of a worker, by rank, differs from that of worker 0."""
    first = workers[0]["environment"]
    changes = ((rank, differences(first, w["environment"])) for rank, w in enumerate(workers))
    # the first one is enough for a warning
    rank, lines = next((pair for pair in changes if pair[1]), (0, ""))
    if lines:
        logging.getLogger("samestep").warning(
            "results may depend on the number of workers, because the environment of worker "
            "%s differs from that of worker 0:\n%s",
            rank,
            lines,
        )


def compare_environments(
    before: Mapping[str, str],
    environment: Mapping[str, str],
    step: int,
    *,
    is_main: bool,
    is_strict: bool,
) -> str:
    """Warn if results may differ from those of the snapshot of `step`; return the differences.

    Raises `ConfigError` instead if `is_strict`.
    """
    before = dict(before)
    seed = before.pop(HASH_SEED, "random")
    others = differences(before, environment)
    if seed != "random":  # which no start can repeat
        before[HASH_SEED] = seed
    lines = differences(before, environment)
    if not lines:
        return ""
    advice = "" if seed in {"random", environment[HASH_SEED]} else KEEP_SEED.format(seed)
    end = f"\n{advice}" if advice else ""
    what = f"the snapshot of step {step} was written by another program or in another environment"
    if is_strict:
        raise ConfigError(
            f"{what}, so resume_strict refuses to resume, because results may differ:\n{lines}{end}"
        )
    if is_main and not others:
        change = f"PYTHONHASHSEED was {seed} and is {environment[HASH_SEED]}"
        text = f"{change}, so a set of strings may have another order; {advice}"
        announce(text, logging.WARNING)
    elif is_main:
        logging.getLogger("samestep").warning(
            "%s, so the results of this run may differ from those of an uninterrupted one:\n%s"
            "\nWhat run.track restores, such as an optimizer with its learning rate, has the "
            "values of the snapshot until the script changes them; all else has the new ones.%s",
            what,
            lines,
            end,
        )
    return lines


def description_of(
    config: Config, settings: Mapping[str, Any], workers: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return what the record says of a start: options, settings, workers and versions."""
    options = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in asdict(config).items()
    }
    if options["on_event"] and is_url(options["on_event"]):
        options["on_event"] = "a URL"  # which may contain a secret
    return {
        "lanes": config.lanes,
        "workers": [
            {name: worker[name] for name in ("rank", "host", "pid", "devices")}
            for worker in workers
        ],
        "devices": workers[0]["devices"],
        "torch": torch.__version__,
        "environment": workers[0]["environment"],
        "format": FORMAT,
        "samestep": samestep_version(),
        "config": mask(options),
        "settings": mask(settings),
        "command": shlex.join(mask_words(sys.argv)),
    }


class CommitQuery:
    """The git commit of the script's folder, found by git while the run starts."""

    def __init__(self) -> None:
        folder = Path(sys.argv[0] or ".").resolve().parent
        command = ["git", "-C", str(folder), "describe", "--always", "--abbrev=40", "--dirty"]
        self._git: subprocess.Popen[str] | None = None
        with suppress(OSError):
            self._git = subprocess.Popen(
                [*command, "--exclude=*"],  # the commit's hash rather than a tag
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )

    @cached_property
    def result(self) -> dict[str, Any]:
        """The `commit`, None if it is unknown, and `dirty`: whether tracked files differ."""
        description = ""
        if self._git is not None:
            try:
                description, _ = self._git.communicate(timeout=COMMIT_SECONDS)
            except subprocess.TimeoutExpired:  # a huge repository, or a slow disk
                self._git.kill()
                self._git.communicate()
        commit, _, dirty = description.strip().partition("-")
        return {"commit": commit or None, "dirty": bool(dirty)}


def plain_settings(settings: Any) -> dict[str, Any]:
    """Return a dict or dataclass as JSON: nested dicts of numbers, text, lists and None."""

    def plain(value: Any) -> Any:
        if is_dataclass(value) and not isinstance(value, type):
            value = {field.name: getattr(value, field.name) for field in fields(value)}
        if isinstance(value, Mapping):
            return {str(name): plain(inner) for name, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(inner) for inner in value]
        return value if value is None or type(value) in {bool, int, float, str} else str(value)

    plain_dict = plain(settings)
    if not isinstance(plain_dict, dict):
        raise ConfigError(
            "settings must be a dict or dataclass of the job's settings, got "
            f"{type(settings).__name__}"
        )
    return plain_dict
