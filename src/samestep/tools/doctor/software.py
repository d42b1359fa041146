"""Checks of torch, samestep's variables, and GPUs as the driver and torch see them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Final

from samestep.cluster import find_process
from samestep.config import merge
from samestep.errors import ConfigError
from samestep.host import counted, whole_number
from samestep.tools.doctor.system import Case, Finding, System, note, problem

_FIELDS: Final = "index,memory.total,memory.used"
GPU_QUERY: Final = ("nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits")


def check_torch(case: Case) -> Iterator[Finding]:
    """Report a torch that cannot be imported."""
    if case.failure:
        yield problem(
            f"torch could not be tested: {case.failure}.",
            "python -c 'import torch.distributed' shows more; pip install torch",
        )


def check_variables(case: Case) -> Iterator[Finding]:
    """Report options and variables of launchers that `samestep.init` would reject."""
    for read in (partial(merge, {}), find_process):
        try:
            read(case.system.environment)
        except ConfigError as error:
            yield problem(f"samestep.init would fail: {error}.", "correct or unset these variables")


@dataclass(frozen=True)
class Gpu:
    """A GPU that the driver reports, whether or not torch can see it. Sizes are in MiB."""

    index: int
    memory: int | None
    used: int | None


def find_gpus(system: System) -> list[Gpu]:
    """Return the GPUs that nvidia-smi reports, without initializing CUDA in this process."""
    lines = (system.run(*GPU_QUERY) or "").splitlines()
    rows = [[cell.strip() for cell in line.split(",")] for line in lines]
    return [
        Gpu(int(row[0]), whole_number(row[1]), whole_number(row[2]))
        for row in rows
        if len(row) == 3 and row[0].isdecimal()
    ]


def check_gpus(case: Case) -> Iterator[Finding]:
    """Report GPUs that torch does not see, that are in use, or that are too few."""
    gpus, seen = find_gpus(case.system), case.torch.get("gpus")
    if not gpus:
        if "nvidia0" in case.system.names("/dev"):
            yield note(
                "this host has a GPU, but nvidia-smi does not respond.",
                "nvidia-smi shows the reason; containers need docker run --gpus all",
            )
        return
    if seen is not None:
        yield from _check_visible(case, len(gpus), seen)
    if seen and case.workers > seen:
        yield note(
            f"{case.workers} workers share {counted(seen, 'GPU')} and exchange gradients "
            "through host memory, because NCCL refuses two workers on one GPU.",
            f"samestep run -n {seen} --lanes {case.workers}: the same bits, and faster",
        )
    yield from _check_use(gpus)


def _check_visible(case: Case, present: int, seen: int) -> Iterator[Finding]:
    """Compare the GPUs that the driver reports with those that torch sees."""
    build, driver = case.torch.get("cuda_build"), _driver_cuda(case.system)
    visible = case.system.environment.get("CUDA_VISIBLE_DEVICES")
    if seen == present:
        return
    if build is None:
        yield problem(
            f"this host has {counted(present, 'GPU')}, but this torch is built for CPUs only.",
            "pip install torch with the index URL for your CUDA version from pytorch.org",
        )
    elif not seen and driver and int(build.partition(".")[0]) > int(driver.partition(".")[0]):
        yield problem(
            f"torch is built for CUDA {build}, but the driver supports CUDA {driver} at most, so "
            "torch finds no GPU.",
            f"update the driver, or install torch built for CUDA {driver.partition('.')[0]}",
        )
    elif visible is not None:
        yield note(
            f"torch sees {seen} of {present} GPUs, because CUDA_VISIBLE_DEVICES={visible}.",
            "unset CUDA_VISIBLE_DEVICES",
        )
    elif not seen:
        yield problem(
            f"nvidia-smi shows {counted(present, 'GPU')}, but torch finds none.",
            'python -c "import torch; torch.cuda.init()" shows the reason. If the driver was '
            "updated, restart the host",
        )


def _driver_cuda(system: System) -> str | None:
    """Return the newest CUDA version that the driver supports."""
    match = re.search(r"CUDA Version:\s*(\d+\.\d+)", system.run("nvidia-smi") or "")
    return match[1] if match else None


def _check_use(gpus: Sequence[Gpu]) -> Iterator[Finding]:
    """Report GPUs that are in use already, and that a run could not record their use."""
    for gpu in gpus:
        if gpu.used and gpu.memory and gpu.used > gpu.memory // 10:
            yield note(
                f"GPU {gpu.index} has {gpu.used} MiB in use already; lanes that "
                "fit on other GPUs may not fit on it.",
                "nvidia-smi shows which processes use it",
            )
    if find_spec("pynvml") is None:
        yield note(
            "the use and the memory of GPUs are not recorded: NVIDIA's library for Python is not "
            "installed.",
            'pip install "samestep[gpu]"',
        )
