"""The first value that differs between two runs in a step: each is repeated, and all compared."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import closing
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import torch
from safetensors.torch import load_file
from torch import Tensor

from samestep.errors import ConfigError, VerifyError
from samestep.masking import MASK
from samestep.plugins.replay import Request
from samestep.plugins.values import files_of
from samestep.record import read_events
from samestep.record.chain import Chain
from samestep.record.source import STARTS
from samestep.run.environment import differences
from samestep.snapshot.read import directory_name
from samestep.snapshot.state import flatten
from samestep.tools import damage_explained, differing, first_failure, first_of
from samestep.tools.replay import RecordedRun, differing_rows, run_again
from samestep.tools.trace import hashes_of, tracked_state

MEANT: Final = {"samples", "rates", "losses"}  # parts of a row; the text of a program may differ


def first_value(directories: Sequence[Path], step: int) -> str:
    """Repeat a step of two runs, and return which of its values is the first one that differs.

    Each begins with its newest snapshot before the step, or its start. Raises `SamestepError` if
    one of them cannot be repeated.
    """
    jobs = []
    for directory in directories:  # both, before either takes its time
        with damage_explained(directory):
            record = RecordedRun.read(directory, step)
            jobs.append((record, _command_of(record)))
    with TemporaryDirectory(prefix="samestep-compare-") as name:
        folders = [Path(name) / side for side in "AB"]
        for job, folder in zip(jobs, folders, strict=True):
            folder.mkdir()
            _repeat(*job, folder)
        return _first_difference(folders, step)


def _command_of(record: RecordedRun) -> list[str]:
    """Return the script and arguments of a run. Raises `ConfigError` without one of them."""
    command = shlex.split(str(record.start.get("command") or "")) or [""]
    where = f"{record.directory} cannot be repeated:"
    if any(MASK in word for word in command):
        raise ConfigError(
            f"{where} its record masks a secret in the arguments of {command[0]}; pass secrets in"
            " files or environment variables"
        )
    if not Path(command[0]).is_file():
        raise ConfigError(
            f"{where} its record says that {command[0]!r} is its script, and there is no such file"
            " here; start this command in the folder in which the run was started"
        )
    return command


def _repeat(record: RecordedRun, command: Sequence[str], folder: Path) -> None:
    """Repeat a step in a folder. Raises `VerifyError` unless its rows are those of the chain."""
    request = Request(record.step, str(folder), saves_state=True, keeps_values=True)
    status = run_again(record, command, 1, record.flags(), request)
    where = f"{record.directory} cannot be repeated:"
    if status or not (folder / directory_name(record.end)).exists():
        raise VerifyError(
            f"{where} {shlex.join(command)} ended with status {status} before the end of step"
            f" {record.step}:\n{first_failure(folder)}"
        )
    with closing(Chain.open(record.directory)) as chain, closing(Chain.open(folder)) as repeated:
        steps = range(max(record.first_step, chain.first), record.end)
        parts = differing_rows(chain, repeated, steps)
    if wrong := [f"{part} from step {parts[part]} on" for part in sorted(parts.keys() & MEANT)]:
        (start, *_) = [event for event in read_events(folder) if event["event"] in STARTS]
        lines = differences(record.start.get("environment", {}), start["environment"])
        raise VerifyError(
            f"{where} it has other {', '.join(wrong)}; restore what is not as in its record:\n"
            + (lines or "  what has no digest there, such as the values of samples")
        )


def _first_difference(folders: Sequence[Path], step: int) -> str:
    """Return the first difference of what two repeated runs have kept, and of their states."""
    for number in (step - 1, step):
        files = [files_of(folder, number) for folder in folders]
        for pair in zip_longest(*files) if all(files) else ():
            if text := _difference([{} if path is None else load_file(path) for path in pair]):
                return f"step {number}, {text}"
    states = [tracked_state(folder / directory_name(step + 1)) for folder in folders]
    names = differing(*map(hashes_of, states))
    if not names:
        return f"step {step}, all values: the same, also those after it"
    names.sort(key=lambda name: name.startswith("plain state"))  # what has a value comes first
    values = [flatten(state)[1].get(names[0]) for state in states]
    own = [value for value in values if isinstance(value, Tensor)]
    gap = f": {_gap(*own)}" if len(own) == len(values) else ""
    return f"after step {step}, {first_of(names)}{gap}"


def _difference(values: Sequence[dict[str, Tensor]]) -> str:
    """Return the first difference of the values in two files, by number and name, "" if none."""
    for names in zip_longest(*map(sorted, values)):
        first, second = (None if name is None else name.partition(" ")[2] for name in names)
        if first != second:
            return f"what is computed: {first or 'nothing'} in A, {second or 'nothing'} in B"
        if gap := _gap(*(own[name] for own, name in zip(values, names, strict=True))):
            return f"{first}: {gap}"
    return ""


def _gap(first: Tensor, second: Tensor) -> str:
    """Return how far two tensors are apart, "" if they have the same bits."""
    kinds = [
        f"{str(own.dtype).removeprefix('torch.')} {list(own.shape)}" for own in (first, second)
    ]
    if kinds[0] != kinds[1]:
        return f"{kinds[0]} in A, {kinds[1]} in B"
    bits = [own.contiguous().view(-1).view(torch.uint8) for own in (first, second)]
    if torch.equal(*bits):
        return ""
    was, now = first.flatten().double(), second.flatten().double()
    same = (was == now) | (was.isnan() & now.isnan())
    gaps = (was - now).abs().nan_to_num(nan=torch.inf).masked_fill(same, 0)
    at = int(gaps.argmax())
    digits = 17 if first.dtype == torch.float64 else 9
    texts = (f"{own[at]:.{digits}g}" for own in (was, now))
    where = "{} in A, {} in B".format(*texts)
    return f"{int((~same).sum())} of {len(was)} values, by at most {gaps[at]:.3g} ({where})"
