"""The tests' side of the simulated devices: builds them, and runs functions on them."""

from __future__ import annotations

import fcntl
import hashlib
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tests.gpu.simulated import CUDA_BUILD, LIBRARY_FILE
from tests.needs import needs
from tests.workers import Outcome, run_workers, try_workers

SOURCE = Path(__file__).with_name("device.cpp")
CUDA_BUILD_SOURCE = Path(__file__).with_name("cuda_build.cpp")
TORCH = Path(torch.__file__).parent
HEADER = TORCH / "include" / "ATen" / "native" / "CPUFallback.h"


def build(cache: Path, source: Path = SOURCE) -> Path:
    """Return the compiled library; it is compiled once for each content, flags and torch."""
    needs("g++")
    needs("torch's C++ headers", is_present=HEADER.exists())
    include = TORCH / "include"
    command = [
        *("g++", "-O0", "-std=c++20", "-shared", "-fPIC", str(source)),
        *(f"-I{folder}" for folder in (include, include / "torch" / "csrc" / "api" / "include")),
        *(f"-L{TORCH / 'lib'}", f"-Wl,-rpath,{TORCH / 'lib'}", "-ltorch_cpu", "-lc10"),
    ]
    content = [source.read_text(), torch.__version__, *command]
    key = hashlib.sha256("\0".join(content).encode()).hexdigest()[:16]
    library = cache / f"{source.stem}-{key}.so"
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process of pytest-xdist may compile it
        if not library.exists():
            new = library.with_suffix(".new")
            done = subprocess.run(
                [*command, "-o", str(new)], capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise RuntimeError(f"{source.name} does not compile:\n{done.stderr[-4000:]}")
            new.rename(library)
    return library


def checked(body: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Return what `body` returned, once all that it leaves behind is freed without a fault."""
    from tests.gpu.simulated.device import check_frees  # loads the devices

    value = body(*args, **options)
    check_frees()
    return value


class SimulatedGpus:
    """Runs functions of test modules, by reference, in new processes with simulated devices.

    With `cuda_build`, the library from `CUDA_BUILD_SOURCE`, torch has CUDA kernels before.
    """

    def __init__(self, library: Path, cuda_build: Path | None = None) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "tests.gpu.simulated.server", str(theirs.fileno())]
        environment = {**os.environ, LIBRARY_FILE: str(library), CUDA_BUILD: str(cuda_build or "")}
        environment.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)  # as in `_default_gpu_check`
        self._process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            env=environment,
            cwd=Path(__file__).parents[3],
        )
        theirs.close()
        self._connection = Connection(ours.detach())
        self.printed = ""

    def call(self, body: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Return what `body` returned in a process of its own. Raises `AssertionError`."""
        return self._request(checked, (body, *args), options)

    def workers(
        self, workers: int, body: Callable[..., Any], *args: Any, **environment: str
    ) -> list[Any]:
        """Return what `body` returned by rank, in the environment of torchrun."""
        options = {"environment": environment}
        return self._request(run_workers, (checked, workers, body, *args), options)

    def ends_of(
        self, workers: int, body: Callable[..., Any], *args: Any, **environment: str
    ) -> list[Outcome]:
        """Return the outcome of each worker; a failure stops no other."""
        options = {"environment": environment}
        return self._request(try_workers, (checked, workers, body, *args), options)

    def _request(self, body: Any, args: Any, options: Any) -> Any:
        environment = {"PYTEST_CURRENT_TEST": os.environ.get("PYTEST_CURRENT_TEST", "")}
        modules = [value.__module__ for value in (body, *args) if callable(value)]
        request = pickle.dumps((body, args, options, environment))
        self._connection.send_bytes(pickle.dumps((modules, request)))
        answer = self._connection.recv_bytes()
        self.printed = self._connection.recv_bytes().decode(errors="replace")
        if not answer:
            raise AssertionError(f"the process crashed:\n{self.printed}")
        succeeded, result = pickle.loads(answer)
        if not succeeded:
            raise AssertionError(f"{result}\n{self.printed}")
        return result

    def close(self) -> None:
        """Stop the process."""
        self._connection.close()
        self._process.wait()
