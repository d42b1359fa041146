"""GPUs, as the driver's own command tells of them and as torch sees them."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from samestep.tools.doctor.section import Section, change, good, note, some
from samestep.tools.doctor.system import whole_number

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from samestep.tools.doctor.case import Case
    from samestep.tools.doctor.section import Finding
    from samestep.tools.doctor.system import System

QUERY: Final = (
    "nvidia-smi",
    "--query-gpu=index,name,memory.total,memory.used,driver_version",
    "--format=csv,noheader,nounits",
)
MEBIBYTE: Final = 1 << 20
_CONTROL: Final = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Gpu:
    """A GPU that the driver shows, be it visible to torch or not."""

    index: int
    name: str
    memory_bytes: int | None
    used_bytes: int | None
    driver: str


def find_gpus(system: System) -> list[Gpu]:
    """Return the GPUs of which nvidia-smi tells; this initialises nothing in this process."""
    rows = [
        [cell.strip() for cell in line.split(",")]
        for line in (system.run(*QUERY) or "").splitlines()
    ]
    return [
        Gpu(int(row[0]), row[1], _mebibytes(row[2]), _mebibytes(row[3]), row[4])
        for row in rows
        if len(row) == 5 and row[0].isdecimal()
    ]


def links(system: System) -> dict[str, str]:
    """Return how pairs of GPUs are linked: NV4 is four NVLinks, and PIX, PXB, PHB, NODE, SYS are ever longer ways over PCIe."""
    rows = [
        _CONTROL.sub("", line).split()
        for line in (system.run("nvidia-smi", "topo", "-m") or "").splitlines()
    ]
    header = next((row for row in rows if row[:1] == ["GPU0"]), [])
    names = [name for name in header if re.fullmatch(r"GPU\d+", name)]
    found = {}
    for row in rows:
        if row and row[0] in names and row is not header:
            later = zip(
                names[names.index(row[0]) + 1 :], row[names.index(row[0]) + 2 :], strict=False
            )
            found.update({f"{row[0]}-{name}": link for name, link in later})
    return found


def examine(case: Case) -> Section:
    """Tell of GPUs."""
    cuda = case.torch.get("cuda")
    facts: dict[str, Any] = {"gpus": [asdict(gpu) for gpu in case.gpus]}
    if case.gpus:
        facts |= {
            "driver_cuda": _driver_cuda(case.system),
            "links": links(case.system),
            "CUDA_VISIBLE_DEVICES": case.system.environment.get("CUDA_VISIBLE_DEVICES", "not set"),
            "torch_sees": cuda["devices"] if cuda else None,
            "peer_access": cuda["peers"] if cuda else None,
            "nccl": cuda["nccl"] if cuda else None,
        }
    return Section("GPUs", facts, list(_judge(case)))


def _driver_cuda(system: System) -> str | None:
    """Return the newest CUDA that the driver runs."""
    found = re.search(r"CUDA Version:\s*(\d+\.\d+)", system.run("nvidia-smi") or "")
    return found[1] if found else None


def _judge(case: Case) -> Iterator[Finding]:
    if not case.gpus:
        if "nvidia0" in case.system.names("/dev"):
            yield note(
                "a GPU is there, and nvidia-smi does not answer: what it is cannot be told.",
                "nvidia-smi says why; containers need docker run --gpus all",
            )
        return
    told = case.torch.get("cuda")
    if told is not None:
        yield from _judge_torch(case, case.torch.get("cuda_build"), told["devices"])
        yield from _judge_peers(told["devices"], told["peers"])
    if told and told["devices"] and case.workers > len(told["devices"]):
        yield note(
            f"{case.workers} workers share {some(len(told['devices']), 'GPU')} and exchange through host memory, since NCCL refuses "
            "two workers on one GPU.",
            f"samestep run -n {len(told['devices'])} --lanes {case.workers}: the same bits, and faster",
        )
    for gpu in case.gpus:
        if gpu.used_bytes and gpu.memory_bytes and gpu.used_bytes > gpu.memory_bytes // 10:
            yield note(
                f"GPU {gpu.index} has {gpu.used_bytes // MEBIBYTE} MiB in use already: lanes that fit elsewhere may not fit there.",
                "nvidia-smi shows which processes hold it",
            )


def _judge_torch(case: Case, build: str | None, devices: Sequence[Any]) -> Iterator[Finding]:
    """Say whether torch can use what the driver shows."""
    runs = _driver_cuda(case.system)
    visible = case.system.environment.get("CUDA_VISIBLE_DEVICES")
    if len(devices) == len(case.gpus):
        yield good(
            f"torch sees all {len(devices)} GPUs" if len(devices) > 1 else "torch sees the GPU"
        )
    elif build is None:
        yield change(
            f"this host has {some(len(case.gpus), 'GPU')} and this torch is built for CPUs alone.",
            "pip install torch with the index URL that pytorch.org gives for your CUDA",
        )
    elif (
        not devices
        and runs is not None
        and int(build.partition(".")[0]) > int(runs.partition(".")[0])
    ):
        yield change(
            f"torch is built for CUDA {build} and the driver runs CUDA {runs} at most, so torch finds no GPU.",
            f"update the driver, or install a torch that is built for CUDA {runs.partition('.')[0]}",
        )
    elif visible is not None:
        yield note(
            f"torch sees {len(devices)} of {len(case.gpus)} GPUs, because CUDA_VISIBLE_DEVICES={visible}.",
            "unset CUDA_VISIBLE_DEVICES",
        )
    elif not devices:
        yield change(
            f"nvidia-smi shows {some(len(case.gpus), 'GPU')} and torch finds none.",
            'python -c "import torch; torch.cuda.init()" says why; mostly it is the driver: restart the host after an update',
        )


def _judge_peers(devices: Sequence[Any], peers: Sequence[Sequence[bool]]) -> Iterator[Finding]:
    without = [
        f"{one}-{other}"
        for one in range(len(peers))
        for other in range(one + 1, len(peers))
        if not peers[one][other]
    ]
    if without:
        yield note(
            f"GPUs {', '.join(without)} do not reach each other's memory, so NCCL passes their gradients through the host's.",
            "switch off ACS in the BIOS or the hypervisor where PCIe peers are blocked; nvidia-smi topo -p2p r shows which",
        )
    elif len(devices) > 1:
        yield good("all GPUs reach each other's memory")


def _mebibytes(text: str) -> int | None:
    count = whole_number(text)
    return None if count is None else MEBIBYTE * count
