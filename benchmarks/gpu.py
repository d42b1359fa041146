"""Proofs and speed on a machine with NVIDIA GPUs, in 10 to 15 minutes.

usage: python -m benchmarks.gpu [--rounds 3] [--minutes 9] [--into docs/gpu.md] [--quick] [--device
cpu]

First `samestep verify` proves on the GPUs that all runs have the same bits. Then contenders take
turns, all with the largest batch that fits. A round starts only if it would end in time. The
results are printed, and inserted into a file. Exits with status 1 if something failed, or without a
GPU.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.gpu_results import ProofResult, Speeds, insert, markdown

SAMESTEP = [sys.executable, "-m", "samestep"]
JOB = str(Path(__file__).with_name("gpu_samestep.py"))
FEATURES_JOB = str(Path(__file__).with_name("gpu_features.py"))
LIMIT_SECONDS = 500  # for one command
SMALLEST_BATCH = 8


@dataclass(frozen=True)
class Proof:
    """A comparison by `samestep verify` that needs some `gpus`; the job gets `flags`."""

    title: str
    arguments: Sequence[str]
    flags: Sequence[str] = ()
    gpus: int = 1
    job: str = JOB


@dataclass(frozen=True)
class Contender:
    """A way to train: a module of benchmarks, options of `samestep run`, and `flags` of the job."""

    title: str
    module: str = "gpu_samestep"
    options: Sequence[str] = ()
    flags: Sequence[str] = ()

    def command(self, flags: Sequence[str]) -> list[str]:
        """Return the command that trains."""
        start = (
            [*SAMESTEP, "run", *self.options] if self.module == "gpu_samestep" else [sys.executable]
        )
        return [*start, "-m", f"benchmarks.{self.module}", *flags, *self.flags]


KILLED = ["-n", "1", "--kill"]
SHARING = Proof("two workers share a GPU, 4 lanes", ["-n", "1,2", "--lanes", "4"])
PROOFS = [
    *(
        Proof(f"killed and resumed, lanes={lanes}", [*KILLED, "--lanes", str(lanes)])
        for lanes in (1, 2, 4)
    ),
    SHARING,
    Proof(
        "two workers share a GPU, GPT-2, 2 lanes, bfloat16",
        ["-n", "1,2", "--lanes", "2"],
        ["--model", "GPT-2", "--batch-size", "8", "--precision", "bfloat16"],
    ),
    Proof(
        "killed and resumed, lanes=2, bfloat16",
        [*KILLED, "--lanes", "2"],
        ["--precision", "bfloat16"],
    ),
    Proof(
        "killed and resumed, lanes=2, torch.compile",
        [*KILLED, "--lanes", "2"],
        ["--compiled", "default"],
    ),
    Proof(
        "killed and resumed, lanes=4, CUDA graphs, and eager",
        [*KILLED, "--lanes", "4", "--steps", "6"],  # the fourth one captures
        ["--graph"],
    ),
    Proof(
        "killed and resumed, lanes=2, CUDA graphs of torch.compile",
        [*KILLED, "--lanes", "2", "--steps", "6"],  # the third lane is the first that is replayed
        ["--compiled", "reduce-overhead"],
    ),
    Proof(
        "one and two workers with a GPU each, one worker with two, 4 lanes",
        ["-n", "1,2,1x2", "--lanes", "4"],
        gpus=2,
    ),
    *(
        Proof(
            f"killed and resumed, lanes=2, BatchNorm, clipping and {feature}",
            [*KILLED, "--lanes", "2"],
            ["--feature", feature],
            job=FEATURES_JOB,
        )
        for feature in ("float16", "embed", "streams")
    ),
]
PLAIN = Contender("plain PyTorch", "gpu_plain")
EAGER = [
    PLAIN,
    Contender("plain, deterministic", "gpu_plain", flags=["--deterministic"]),
    Contender("plain, CUDA graph", "gpu_plain", flags=["--graph"]),
    Contender(
        "plain, CUDA graph, deterministic", "gpu_plain", flags=["--graph", "--deterministic"]
    ),
    Contender("plain, 4 parts added up", "gpu_plain", flags=["--accumulate", "4"]),
    Contender(
        "plain, 4 parts added up, deterministic",
        "gpu_plain",
        flags=["--accumulate", "4", "--deterministic"],
    ),
    Contender("plain, 4 parts, CUDA graph", "gpu_plain", flags=["--accumulate", "4", "--graph"]),
    Contender(
        "plain, 4 parts, CUDA graph, deterministic",
        "gpu_plain",
        flags=["--accumulate", "4", "--graph", "--deterministic"],
    ),
    Contender("Accelerate", "gpu_accelerate"),
    Contender("Accelerate, deterministic", "gpu_accelerate", flags=["--deterministic"]),
    Contender("Fabric", "gpu_fabric"),
    Contender("Fabric, deterministic", "gpu_fabric", flags=["--deterministic"]),
    *(
        Contender(
            f"samestep, {lanes} lane{'s' * (lanes > 1)}{words}",
            options=["--lanes", str(lanes), "--deterministic", value],
        )
        for lanes in (1, 4, 8)
        for value, words in (("true", ""), ("false", ", deterministic=False"))
    ),
    *(
        Contender(
            f"samestep, {lanes} lane{'s' * (lanes > 1)}, CUDA graphs",
            options=["--lanes", str(lanes)],
            flags=["--graph"],
        )
        for lanes in (1, 4, 8)
    ),
]
COMPILED = [
    *(
        Contender(f"{who}, {words}", module, flags=["--compiled", mode])
        for mode, words in (("default", "torch.compile"), ("reduce-overhead", "its CUDA graphs"))
        for who, module in (("plain PyTorch", "gpu_plain"), ("samestep", "gpu_samestep"))
    ),
    Contender(
        "plain PyTorch, torch.compile, deterministic",
        "gpu_plain",
        flags=["--compiled", "default", "--deterministic"],
    ),
    Contender(
        "samestep, torch.compile, deterministic=False",
        options=["--deterministic", "false"],
        flags=["--compiled", "default"],
    ),
]
COMPILED.append(
    Contender(
        "samestep, 4 lanes, its CUDA graphs",
        options=["--lanes", "4"],
        flags=["--compiled", "reduce-overhead"],
    )
)
FEW = ("samestep, 4 lanes", "samestep, 4 lanes, CUDA graphs")  # beside plain PyTorch
FOR_TEXT = (  # beside plain PyTorch, which GPUs limit
    "plain, deterministic",
    "Accelerate, deterministic",
    "samestep, 1 lane",
    "samestep, 1 lane, deterministic=False",
    "samestep, 1 lane, CUDA graphs",
    "samestep, 4 lanes",
    "plain PyTorch, torch.compile",
    "samestep, torch.compile",
)
# bound by the GPU, by launches on most hosts, and by the GPU: models and their largest batches
JOBS = (("ViT-S/16", 512), ("ViT-S/16", 128), ("GPT-2", 16))
OPTIONAL = {"gpu_accelerate": "accelerate", "gpu_fabric": "lightning"}


def main() -> int:
    """Run everything; return the exit status."""
    options = _options()
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "no GPU: torch found none; --device cpu --quick tries this benchmark without one",
            file=sys.stderr,
        )
        return 1
    ends = time.monotonic() + 60 * options.minutes
    proofs = prove(options.device, quick=options.quick)
    speeds = measure(options.device, options.rounds, ends, quick=options.quick)
    text = markdown(_machine(options.device), proofs, speeds)
    print(text)
    if options.into is not None:
        insert(text, options.into)
    return int(
        any(proof.failed for proof in proofs) or any(comparison.failed for comparison in speeds)
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="runs of each contender at the most (default: 3)"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=9.0,
        help="in which rounds must end, proofs included (default: 9)",
    )
    parser.add_argument(
        "--into", type=Path, help="the file with a place for the results, such as docs/gpu.md"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model, one round: tries the benchmark itself"
    )
    return parser.parse_args()


def prove(device: str, *, quick: bool) -> list[ProofResult]:
    """Run the proofs for which there are enough devices."""
    gpus = torch.cuda.device_count() if device == "cuda" else 1
    job = ["--model", "tiny" if quick else "ViT-Ti/16", "--device", device]
    return [_proved(proof, job) for proof in ([SHARING] if quick else PROOFS) if proof.gpus <= gpus]


def _proved(proof: Proof, job: Sequence[str]) -> ProofResult:
    # the only visible one, shared by all workers
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    seen = {"CUDA_VISIBLE_DEVICES": first} if proof.gpus == 1 else {}
    done = run(
        [*SAMESTEP, "verify", "--steps", "3", *proof.arguments, proof.job, *job, *proof.flags], seen
    )
    verdict = [
        line
        for line in done.stdout.splitlines()
        if line.startswith(("the same at every step", "DIFFERENT"))
    ]
    return ProofResult(
        proof.title, verdict[-1] if verdict else last_line(done), failed=done.returncode != 0
    )


def measure(device: str, rounds: int, ends: float, *, quick: bool) -> list[Speeds]:
    """Measure the contenders of each batch in turn, for at least one round and until time is up."""
    timed = ["--seconds", "0.2"] if quick else ["--seconds", "1.5", "--loader-workers", "8"]
    flags = ["--device", device, "--precision", "bfloat16", *timed]
    jobs: dict[tuple[str, int], tuple[Sequence[Contender], Speeds]] = {}
    for model, size in (("tiny", 32),) if quick else JOBS:
        batch = size if quick else largest_batch([*flags, "--model", model], size)
        title = f"{model}, batch {batch}, bfloat16"
        jobs[model, batch] = contenders_for(model), Speeds(title, PLAIN.title)
    for number in range(1 if quick else rounds):
        began = time.monotonic()
        for (model, batch), (contenders, speeds) in jobs.items():
            first = number % len(contenders)
            for contender in [*contenders[first:], *contenders[:first]]:
                of_job = ["--model", model, "--batch-size", str(batch)]
                done = run(contender.command([*flags, *of_job]))
                speeds.add(
                    contender.title, done.stdout, "" if done.returncode == 0 else last_line(done)
                )
        if time.monotonic() + (time.monotonic() - began) > ends:
            break
    return [speeds for _, speeds in jobs.values()]


def contenders_for(model: str) -> list[Contender]:
    """Return the contenders whose libraries are here: all for a ViT, some for other models."""
    titles = {"GPT-2": FOR_TEXT, "tiny": FEW}.get(model, ())
    return [
        contender
        for contender in EAGER + COMPILED
        if (not titles or contender.title in (PLAIN.title, *titles))
        and (contender.module not in OPTIONAL or find_spec(OPTIONAL[contender.module]))
    ]


def largest_batch(flags: Sequence[str], size: int) -> int:
    """Return the largest batch that fits in the GPU's memory: `size`, or halved as needed."""
    while size > SMALLEST_BATCH:
        done = run(PLAIN.command([*flags, "--seconds", "0", "--batch-size", str(size)]))
        if "out of memory" not in done.stderr:
            break
        size //= 2
    return size


def run(
    command: Sequence[str], environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command and report it. One that takes too long fails."""
    print(f"$ {' '.join(command[1:])}", file=sys.stderr, flush=True)
    with subprocess.Popen(
        command,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()  # a launcher then ends its workers
            stdout, stderr = process.communicate()
            stderr += f"\nstill ran after {LIMIT_SECONDS} seconds"
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last line of a failed command."""
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return said[-1] if said else f"ended with status {done.returncode}"


def _machine(device: str) -> str:
    if device == "cpu":
        return f"{platform.machine()} CPU, torch {torch.__version__}"
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return f"{len(names)} x {names[0]}, torch {torch.__version__}, CUDA {torch.version.cuda}"


if __name__ == "__main__":
    raise SystemExit(main())
