"""A script that `samestep verify` runs at several sizes, and what its steps left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from samestep.errors import VerifyError
from samestep.snapshot.read import list_snapshots
from samestep.tools.trace import read_start, read_traces

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from samestep.tools.trace import StepTrace
    from samestep.tools.verify import Size

KILL_TRIES: Final = 5
# nothing leaves its directory
ITS_OWN: Final = (
    "--remote",
    "none",
    "--transfer",
    "none",
    "--sinks",
    "none",
    "--max-restarts",
    "0",
)


def start_run(
    command: Sequence[str], workers: int, directory: Path, output: Path, flags: Sequence[str]
) -> subprocess.Popen[bytes]:
    """Start a script at so many workers, in a directory of its own, and let it print at the end of a file."""
    started = [
        sys.executable,
        "-m",
        "samestep",
        "run",
        "-n",
        str(workers),
        "--dir",
        str(directory),
        *ITS_OWN,
        *flags,
        *command,
    ]
    with output.open("ab") as file:
        return subprocess.Popen(
            started, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
        )


class Job:
    """A script that is run for some steps, each time in a directory of its own."""

    def __init__(self, command: Sequence[str], steps: int, lanes: int | None) -> None:
        self.lanes = lanes
        self._command, self._steps = list(command), steps

    def trace(self, size: Size) -> list[StepTrace]:
        """Run to the end and return what each step left."""
        with tempfile.TemporaryDirectory(prefix="samestep-verify-") as name:
            directory = Path(name)
            self._finish(size, directory, "never")
            self._fix_lanes(directory)
            return read_traces(directory)

    def trace_with_kill(
        self, size: Size, size_after: Size, draw: random.Random
    ) -> tuple[str, list[StepTrace]]:
        """Kill a worker after some step, resume at another size; return what was done and what each step left."""
        for _ in range(KILL_TRIES):
            with tempfile.TemporaryDirectory(prefix="samestep-verify-") as name:
                directory, step, rank = (
                    Path(name),
                    draw.randint(1, self._steps - 1),
                    draw.randrange(size.workers),
                )
                if not self._kill(size, directory, step, rank):
                    continue
                self._finish(size_after, directory, "auto")
                resumed_at = read_start(directory)["step"]
                title = f"n={size}, worker {rank} killed, n={size_after} from step {resumed_at}"
                return title, read_traces(directory)
        raise VerifyError(
            f"the job ended before a worker could be killed, {KILL_TRIES} times: give more --steps"
        )

    def _kill(self, size: Size, directory: Path, step: int, rank: int) -> bool:
        """Start, kill a worker once the snapshot of `step` is there; tell whether that ended the job."""
        with self._start(size, directory, "never", directory / "output.txt") as process:
            while process.poll() is None and not any(
                path.name == f"step-{step:08d}" for path in list_snapshots(directory)
            ):
                time.sleep(0.002)
            if process.poll() is None:
                pid = next(
                    worker["pid"]
                    for worker in read_start(directory)["workers"]
                    if worker["rank"] == rank
                )
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    process.wait()
                    return False
            return process.wait() != 0

    def _finish(self, size: Size, directory: Path, resume: str) -> None:
        output = directory / "output.txt"
        with self._start(size, directory, resume, output) as process:
            process.wait()
        if process.returncode != 0:
            tail = "\n".join(output.read_text(errors="replace").splitlines()[-30:])
            raise VerifyError(
                f"the script failed at n={size} with status {process.returncode}:\n{tail}"
            )
        read_start(directory)
        if not list_snapshots(directory):
            raise VerifyError(
                "the script left nothing to compare: it must track its model and optimizer (run.track) and train at least a step"
            )

    def _start(
        self, size: Size, directory: Path, resume: str, output: Path
    ) -> subprocess.Popen[bytes]:
        flags = [
            "--resume",
            resume,
            "--stop-after",
            str(self._steps),
            "--snapshot-every",
            "1",
            "--keep-last",
            str(self._steps),
        ]
        flags += [] if self.lanes is None else ["--lanes", str(self.lanes)]
        flags += [] if size.devices == 1 else ["--devices", str(size.devices)]
        print(f"running at n={size} …", file=sys.stderr, flush=True)
        return start_run(self._command, size.workers, directory, output, flags)

    def _fix_lanes(self, directory: Path) -> None:
        lanes = read_start(directory)["lanes"]
        if self.lanes not in {None, lanes}:
            raise VerifyError(
                f"the runs had {self.lanes} and {lanes} lanes; expected the same: fix them in the script or by --lanes"
            )
        self.lanes = lanes
