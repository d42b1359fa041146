"""The chain of a run: what each step did, as a row of digests (`record/chain.py`).

| part | what its digest covers |
|---|---|
| program | the script and the modules of its folder that it has imported; lanes, precisions; \
the length of the step's data set |
| samples | the loop's name, the number of samples of each lane, and their indices; of a stream, \
which has none, the number of the loop's step |
| rates | for each update by an optimizer, the numbers among the options of its parameter groups |
| losses | for each backward call, the lanes with items, their items and losses; whether the batch \
was skipped |

All are the same on any number of workers. Left out is what may change without a change of the
steps' meaning: arguments and settings, which have names of folders, versions, devices and threads.
If any of these changes the bits, losses will tell.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import torch

from samestep.config import Config
from samestep.data.plan import Plan
from samestep.errors import SnapshotError
from samestep.plugin import EndedStep, RunPlugin
from samestep.record.chain import HEAD_BYTES, STATE, ChainFile, Parts, origin, short_digest
from samestep.step.lane_pass import StepPlugin, StepResult

_LANE: Final = struct.Struct("<qdd")  # its number, items and loss
_COUNT: Final = struct.Struct("<q")
_INDEX: Final = np.dtype("<i8")
AHEAD: Final = 16  # steps whose samples have a digest at once: most of its time is to begin


class History(RunPlugin, StepPlugin):
    """Writes the chain of a run; only the worker that has the record needs it.

    `begin(step, head)` opens the file at the first step. `files()` returns the digests of the
    program's files by name, and `state` is that of the run in the snapshot from which it resumes.
    Raises `SnapshotError` for a state that no run has saved.
    """

    def __init__(
        self,
        config: Config,
        begin: Callable[[int, bytes], ChainFile | None],
        files: Callable[[], Mapping[str, str]],
        state: Mapping[str, Any],
    ) -> None:
        self._begin, self._files = begin, files
        self._head = origin(config.seed) if (head := state.get(STATE)) is None else _head_of(head)
        self._options = {
            "lanes": config.lanes,
            "precision": config.precision,
            "exchange_dtype": config.exchange_dtype,
            "default dtype": str(torch.get_default_dtype()),
            "matmul precision": torch.get_float32_matmul_precision(),
        }
        self._file: ChainFile | None = None
        self._losses: list[bytes] = []  # of each backward call of the step
        self._rates: list[str] = []  # of each update
        self._known: Mapping[str, str] = {}  # files
        self._programs: dict[int | None, bytes] = {}  # digests by the length of the data
        self._plan: Plan | None = None  # of the last step
        self._samples: dict[tuple[int, int], bytes] = {}  # digests by epoch and step, of the plan

    def begin_step(self, step: int) -> None:
        """Forget what was done between steps, or in a step that was left."""
        if self._file is None:
            self._file = self._begin(step, self._head)
        self._losses.clear()
        self._rates.clear()

    def end(self, result: StepResult) -> None:
        """Note the losses of a backward call."""
        lanes = [
            _LANE.pack(lane.lane, lane.count, _loss_of(lane.metrics)) for lane in result.results
        ]
        self._losses.append(b"".join([_COUNT.pack(len(lanes)), *lanes]))
        if result.skipped is not None:
            self._losses.append(b"skipped")

    def before_update(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Note the options of an optimizer, before its update."""
        groups = map(_options_of, optimizer.param_groups)
        self._rates.append(f"{type(optimizer).__name__} {'; '.join(groups)}")

    def end_step(self, ended: EndedStep) -> None:
        """Write the row of a step."""
        if self._file is not None:
            self._file.append(self._parts(ended))

    def state(self, current: EndedStep | None) -> dict[str, Any]:
        """Return the head of what a snapshot holds, which may be taken at the end of a body."""
        head = self._head if self._file is None else self._file.head
        if current is not None and self._file is not None:
            head = self._file.put(self._parts(current))  # durable before the snapshot
        return {STATE: head.hex()}

    def _parts(self, ended: EndedStep) -> Parts:
        return (
            self._samples_of(ended),
            short_digest(b"".join(self._losses)),
            short_digest("\n".join(self._rates).encode()),
            self._program(ended),
        )

    def _samples_of(self, ended: EndedStep) -> bytes:
        source, name = ended.batch.origin, ended.loop.encode()
        if source is None:
            return short_digest(b"stream %d " % ended.done + name)
        plan, epoch, step = source.plan, source.epoch, source.step
        if plan is not self._plan or (epoch, step) not in self._samples:
            end = min(step + AHEAD, plan.steps_per_epoch) if plan.is_fixed else step
            self._plan, self._samples = plan, {}
            for number in range(step, max(step + 1, end)):
                counts = plan.counts(epoch, number)
                numbers = np.array([len(counts), *counts], dtype=_INDEX)
                indices = plan.indices_of_step(epoch, number).astype(_INDEX, copy=False)
                content = b"".join((numbers.tobytes(), indices.tobytes(), name))
                self._samples[epoch, number] = short_digest(content)
        return self._samples[epoch, step]

    def _program(self, ended: EndedStep) -> bytes:
        files = self._files()
        if files != self._known:  # a module was imported
            self._known, self._programs = files, {}
        source = ended.batch.origin
        length = None if source is None else source.plan.size
        if length not in self._programs:
            program = {"files": dict(files), "options": self._options, "samples": length}
            self._programs[length] = short_digest(json.dumps(program, sort_keys=True).encode())
        return self._programs[length]


def _head_of(text: object) -> bytes:
    try:
        head = bytes.fromhex(str(text))
    except ValueError:
        head = b""
    if len(head) != HEAD_BYTES:
        raise SnapshotError(
            f"the head of the chain in the snapshot must have {2 * HEAD_BYTES} hexadecimal digits,"
            f" got {text!r:.80}; resume from another snapshot"
        )
    return head


def _loss_of(metrics: Mapping[str, Any]) -> float:
    loss = metrics.get("loss", math.nan)
    is_number = isinstance(loss, float) and not math.isnan(loss)
    return loss if is_number else math.nan  # of which there are many


def _options_of(group: Mapping[str, Any]) -> str:
    """Return the numbers among the options of a parameter group; in every step, so it is fast."""
    texts = []
    for name in sorted(group):
        value = group[name]
        if value is None or name == "params":
            continue
        if text := repr(value) if type(value) is float else _numbers(value):
            texts.append(f"{name}={text}")
    return ", ".join(texts)


def _numbers(value: Any) -> str:
    """Return the bits of an option that is a number, or a tuple or list with numbers, else ""."""
    if isinstance(value, bool):
        return ""  # says which kernel is used, or is as constant as the program
    if isinstance(value, float):
        return float.__repr__(value)
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, (tuple, list)):
        return " ".join(map(_numbers, value))
    if isinstance(value, torch.Tensor) and value.numel() == 1 and value.is_cpu:
        return float.__repr__(float(value.detach()))  # reading that of a GPU would wait for it
    return ""
