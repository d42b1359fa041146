"""Checks of Python packages, samestep's variables, and GPUs as the driver and torch see them."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from itertools import combinations
from typing import Any, Final

from samestep.config import PREFIX, TOKEN, is_url, merge
from samestep.errors import ConfigError
from samestep.tools import some, whole_number
from samestep.tools.doctor.system import Case, Finding, Section, System, good, note, problem

INTERNAL: Final = f"{PREFIX}INTERNAL_"
CORE_EXTRAS: Final = ("images", "metrics", "remote", "s3", "kubernetes", "watch", "plot")
EXTRAS: Final = (*CORE_EXTRAS, "tensorboard", "mlflow", "wandb")
_FIELDS: Final = "index,name,memory.total,memory.used,driver_version"
GPU_QUERY: Final = ("nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits")
MEBIBYTE: Final = 1 << 20
_REQUIREMENT: Final = re.compile(r"""([\w.-]+)(?:\[([^\]]*)\])?.*?extra\s*==\s*["']([^"']+)["']""")
_CONTROL: Final = re.compile(r"\x1b\[[0-9;]*m")


def examine_software(case: Case) -> Section:
    """Report versions, extras and samestep's variables."""
    torch, environment, missing = case.torch, case.system.environment, missing_by_extra()
    facts: dict[str, Any] = {
        "host": platform.node(),
        "kernel": platform.release(),
        "samestep": _version("samestep"),
        "python": platform.python_version(),
        "torch": torch.get("version") or _version("torch"),
        "torch_cuda": torch.get("cuda_build", "none") or "none" if torch else None,
        "torch_backends": torch.get("backends"),
        "numpy": _version("numpy"),
        "extras": {
            extra: f"missing {', '.join(packages)}" if packages else "installed"
            for extra, packages in missing.items()
        },
        "variables": {
            name: "set" if name == TOKEN else environment[name]  # never the secret itself
            for name in sorted(environment)
            if name.startswith(PREFIX) and not name.startswith(INTERNAL)
        },
    }
    findings = [*_check_torch(case), *_check_variables(environment, missing)]
    return Section("software", facts, findings)


def missing_by_extra() -> dict[str, list[str]]:
    """Return the packages that are not installed, for each extra of samestep."""
    try:
        lines = requires("samestep") or []
    except PackageNotFoundError:  # samestep runs from its source tree
        lines = []
    needed: dict[str, list[str]] = {extra: [] for extra in EXTRAS}
    for line in lines:
        if (match := _REQUIREMENT.match(line)) and match[3] in needed:
            package, extras, extra = match.groups()
            needed[extra] += extras.split(",") if package == "samestep" and extras else [package]
    missing = {}
    for extra, names in needed.items():
        packages = [package for name in names for package in needed.get(name, [name])]
        missing[extra] = [package for package in packages if _version(package) is None]
    return missing


@cache
def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _check_torch(case: Case) -> Iterator[Finding]:
    backends = case.torch.get("backends", ())
    if case.failure:
        yield problem(
            f"torch could not be tested: {case.failure}.",
            "python -c 'import torch.distributed' shows more; pip install torch",
        )
    elif case.torch and "gloo" not in backends:
        yield problem(
            "this torch has no gloo backend, which workers on several hosts need.",
            "pip install torch, from PyPI or pytorch.org",
        )
    elif case.torch:
        yield good(f"torch {case.torch.get('version')} has {', '.join(backends)}")


def _check_variables(
    environment: Mapping[str, str], missing: Mapping[str, Sequence[str]]
) -> Iterator[Finding]:
    try:
        config = merge({}, environment)
    except ConfigError as error:
        yield problem(f"samestep.init would fail: {error}.", "correct or unset that variable")
        return
    remote = [text for text in (config.remote, config.resume) if text is not None and is_url(text)]
    extra = "s3" if any(text.startswith("s3:") for text in remote) else "remote"
    if remote and missing[extra]:
        yield problem(
            f"a variable is set to {remote[0]}, which needs {', '.join(missing[extra])}.",
            f'pip install "samestep[{extra}]"',
        )
    if extras := [name for name, packages in missing.items() if packages]:
        yield note(
            f"some extras are not installed: {', '.join(extras)}.",
            f'pip install "samestep[{",".join(extras)}]", or only those that you need',
        )


@dataclass(frozen=True)
class Gpu:
    """A GPU that the driver reports, whether or not torch can see it."""

    index: int
    name: str
    memory_bytes: int | None
    used_bytes: int | None
    driver: str


def find_gpus(system: System) -> list[Gpu]:
    """Return the GPUs that nvidia-smi reports, without initializing CUDA in this process."""
    lines = (system.run(*GPU_QUERY) or "").splitlines()
    rows = [[cell.strip() for cell in line.split(",")] for line in lines]
    return [
        Gpu(int(row[0]), row[1], _mebibytes(row[2]), _mebibytes(row[3]), row[4])
        for row in rows
        if len(row) == 5 and row[0].isdecimal()
    ]


def _mebibytes(text: str) -> int | None:
    return None if (count := whole_number(text)) is None else MEBIBYTE * count


def examine_gpus(case: Case) -> Section:
    """Report GPUs and how they are linked."""
    gpus, cuda, system = find_gpus(case.system), case.torch.get("cuda"), case.system
    facts: dict[str, Any] = {"gpus": [asdict(gpu) for gpu in gpus]}
    if not gpus:
        silent = note(
            "this host has a GPU, but nvidia-smi does not respond.",
            "nvidia-smi shows the reason; containers need docker run --gpus all",
        )
        return Section("GPUs", facts, [silent] if "nvidia0" in system.names("/dev") else [])
    facts |= {
        "driver_cuda": _driver_cuda(system),
        "links": _links(system),
        "CUDA_VISIBLE_DEVICES": system.environment.get("CUDA_VISIBLE_DEVICES", "not set"),
        "torch_sees": cuda["devices"] if cuda else None,
        "peer_access": cuda["peers"] if cuda else None,
        "nccl": cuda["nccl"] if cuda else None,
    }
    return Section("GPUs", facts, list(_check_gpus(case, gpus)))


def _driver_cuda(system: System) -> str | None:
    """Return the newest CUDA version that the driver supports."""
    match = re.search(r"CUDA Version:\s*(\d+\.\d+)", system.run("nvidia-smi") or "")
    return match[1] if match else None


def _links(system: System) -> dict[str, str]:
    """Return the link between each pair of GPUs, as `nvidia-smi topo` names it.

    NV4 is four NVLinks; PIX, PXB, PHB, NODE and SYS are increasingly long paths over PCIe.
    """
    lines = (system.run("nvidia-smi", "topo", "-m") or "").splitlines()
    rows = [_CONTROL.sub("", line).split() for line in lines]
    header = next((row for row in rows if row[:1] == ["GPU0"]), [])
    names = [name for name in header if re.fullmatch(r"GPU\d+", name)]
    return {
        f"{row[0]}-{name}": link
        for row in rows
        if row and row[0] in names and row is not header
        for name, link in list(zip(names, row[1:], strict=False))[names.index(row[0]) + 1 :]
    }


def _check_gpus(case: Case, gpus: Sequence[Gpu]) -> Iterator[Finding]:
    if (cuda := case.torch.get("cuda")) is not None:
        devices = cuda["devices"]
        yield from _check_visible(case, len(gpus), len(devices))
        yield from _check_peers(len(devices), cuda["peers"])
        if devices and case.workers > len(devices):
            yield note(
                f"{case.workers} workers share {some(len(devices), 'GPU')} and exchange gradients "
                "through host memory, because NCCL refuses two workers on one GPU.",
                f"samestep run -n {len(devices)} --lanes {case.workers}: the same bits, and faster",
            )
    for gpu in gpus:
        if gpu.used_bytes and gpu.memory_bytes and gpu.used_bytes > gpu.memory_bytes // 10:
            yield note(
                f"GPU {gpu.index} has {gpu.used_bytes // MEBIBYTE} MiB in use already; lanes that "
                "fit on other GPUs may not fit on it.",
                "nvidia-smi shows which processes use it",
            )
    if find_spec("pynvml") is None:
        yield note(
            "the use and the memory of GPUs are not recorded: NVIDIA's library for Python is not "
            "installed.",
            'pip install "samestep[gpu]"',
        )


def _check_visible(case: Case, present: int, seen: int) -> Iterator[Finding]:
    """Compare the GPUs that the driver reports with those that torch sees."""
    build, driver = case.torch.get("cuda_build"), _driver_cuda(case.system)
    visible = case.system.environment.get("CUDA_VISIBLE_DEVICES")
    if seen == present:
        yield good(f"torch sees all {seen} GPUs" if seen > 1 else "torch sees the GPU")
    elif build is None:
        yield problem(
            f"this host has {some(present, 'GPU')}, but this torch is built for CPUs only.",
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
            f"nvidia-smi shows {some(present, 'GPU')}, but torch finds none.",
            'python -c "import torch; torch.cuda.init()" shows the reason. If the driver was '
            "updated, restart the host",
        )


def _check_peers(devices: int, peers: Sequence[Sequence[bool]]) -> Iterator[Finding]:
    pairs = combinations(range(len(peers)), 2)
    without = [f"{one}-{other}" for one, other in pairs if not peers[one][other]]
    if without:
        yield note(
            f"GPUs {', '.join(without)} cannot access each other's memory, so NCCL copies their "
            "gradients through host memory.",
            "if PCIe peer access is blocked, disable ACS in the BIOS or the hypervisor; "
            "nvidia-smi topo -p2p r shows the pairs",
        )
    elif devices > 1:
        yield good("all GPUs can access each other's memory")
