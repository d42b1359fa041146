"""Checks of torch, and of GPUs as the driver and torch see them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from samestep.host import counted
from samestep.tools.doctor.system import Case, Finding, System, note, problem


def check_torch(case: Case) -> Iterator[Finding]:
    """Report a torch that cannot be imported."""
    if case.failure:
        yield problem(
            f"torch could not be tested: {case.failure}.",
            "run python -c 'import torch.distributed', which shows more. If it works, run samestep "
            "doctor again when other programs have ended; if not, pip install torch",
        )


def present_gpus(system: System) -> int:
    """Return the number of GPUs that the driver reports, without initializing CUDA here."""
    return len(re.findall(r"^GPU \d+:", system.run("nvidia-smi", "-L") or "", re.MULTILINE))


def check_gpus(case: Case) -> Iterator[Finding]:
    """Report GPUs that torch does not see, which a run leaves unused, and too few of them."""
    present, seen = present_gpus(case.system), case.torch.get("gpus")
    if seen is None:
        return
    if seen < present:
        build, visible = case.torch.get("cuda_build"), "CUDA_VISIBLE_DEVICES"
        if build and visible in case.system.environment:
            why = f"{visible}={case.system.environment[visible]}"
            yield note(f"torch sees {seen} of {present} GPUs: {why}.", f"unset {visible}")
        else:
            driver = re.search(r"CUDA Version:\s*(\d+\.\d+)", case.system.run("nvidia-smi") or "")
            built = f"built for {f'CUDA {build}' if build else 'CPUs only'}"
            yield problem(
                f"torch sees {seen} of {counted(present, 'GPU')}. It is {built}; the driver "
                f"supports CUDA {driver[1] if driver else 'of an unknown version'}.",
                "install torch built for a CUDA version that the driver supports; "
                'python -c "import torch; torch.cuda.init()" shows other reasons',
            )
    if 0 < seen < case.workers:
        yield note(
            f"{case.workers} workers share {counted(seen, 'GPU')} and exchange gradients "
            "through host memory, because NCCL refuses two workers on one GPU.",
            f"samestep run -n {seen} --lanes {case.workers}: the same bits, and faster",
        )
