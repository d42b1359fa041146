"""`samestep receipt`: a file that says what a run was, and commands that check it against the run.

A receipt fixes the chain, the record, and the files of snapshots by their digests. `make` and
`check` read only files, without torch, NumPy or data; `replay` repeats segments of the run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import sys
from collections.abc import Mapping
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from samestep.errors import ConfigError, RecordError, SamestepError, SnapshotError, VerifyError
from samestep.host import GREEN, RED, colored, counted
from samestep.record import read_history
from samestep.record.chain import Chain, snapshots_of
from samestep.record.events import FILE_NAME, parse_events, read_lines, samestep_version
from samestep.record.orders import order_files
from samestep.record.source import STARTS, begins_anew
from samestep.storage import open_regular, read_regular, write_atomically
from samestep.tools import add_script, command_of, first_failure, started
from samestep.tools.replay import (
    OPTIONS,
    RecordedRun,
    differing_means,
    differing_rows,
    means_of,
)

FORMAT: Final = 1
LARGEST: Final = 2**26  # bytes of a receipt
READ_BYTES: Final = 2**20
HEX: Final = re.compile(r"[0-9a-f]{64}")
SNAPSHOT: Final = re.compile(r"step-(\d{8,})")
MANIFEST: Final = "manifest.json"
OF_START: Final = (
    *("event", "step", "lanes", "samestep", "torch", "environment", "settings", "command"),
    *("commit", "dirty"),
)
OF_LOOP: Final = ("name", "step", "epochs", "steps_per_epoch", "samples", "batch_size", "plan")
PARTS: Final = {  # of a receipt, and what each says
    "chain": "the chain of steps",
    "record": "the record",
    "starts": "starts: code, options, environment",
    "loops": "loops: plans and lengths of data",
    "orders": "arrays of orders",
    "snapshots": "snapshots",
}
LEFT: Final = (
    "not checked: that these digests are of what the code does with its data; `samestep receipt"
    " replay` repeats segments to see that"
)
NO_ANCHOR: Final = (
    "no anchor: whoever can write to the run and the receipt can replace both; compare with a line"
    " that was kept elsewhere, by --head"
)
NOT_REPEATED: Final = (
    "not compared: evaluations, images, and values that the script logs by itself, which are no"
    " means of run.backward"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `samestep receipt` to its parser."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    run, receipt = "directory of the run, which is only read", "receipt of `samestep receipt make`"
    make = actions.add_parser("make", help="write the receipt of a run")
    make.add_argument("run", type=Path, help=run)
    out = "file to write (default: RUN/receipt.json)"
    make.add_argument("--out", type=Path, metavar="FILE", help=out)
    check = actions.add_parser("check", help="check a receipt, and a run against it")
    check.add_argument("file", type=Path, help=receipt)
    check.add_argument("run", type=Path, nargs="?", help=run)
    head = "head or digest of the line that `make` printed, from where it was kept"
    check.add_argument("--head", metavar="HEX", help=head)
    replay = actions.add_parser("replay", help="repeat random segments between snapshots")
    replay.add_argument("file", type=Path, help=receipt)
    replay.add_argument("run", type=Path, help=run)
    segments = "segments to repeat on one worker (default: 5)"
    replay.add_argument("--segments", type=int, default=5, metavar="N", help=segments)
    seed = "seed that chooses the segments (default: a random one, which is printed)"
    replay.add_argument("--seed", type=int, metavar="N", help=seed)
    add_script(replay, "training script of the run")


def main(options: argparse.Namespace) -> int:
    """Run the action; return 0, or 1 if something is not as the receipt says."""
    if options.action == "make":
        receipt, file = make(options.run), options.out or options.run / "receipt.json"
        try:
            write_atomically(file, _to_bytes(receipt))
        except OSError as error:
            raise ConfigError(f"cannot write {file}: {error.strerror}") from error
        print(f"wrote {file}; keep this line elsewhere, such as in a commit:")
        print(anchor_of(receipt))
        return 0
    receipt = read(options.file)
    if options.action == "check":
        verdicts = Verdicts()
        check(receipt, options.run, options.head, verdicts)
        return int(verdicts.differs)
    return replay(receipt, options)


def make(directory: Path, size: int | None = None, steps: int | None = None) -> dict[str, Any]:
    """Return the receipt of a run, or of its record's first `size` bytes and first `steps` steps.

    Raises `RecordError` if the run has no record or no chain, and `SnapshotError`.
    """
    digest, events, size = _read_record(directory, size)
    starts, loops = list[dict[str, Any]](), list[dict[str, Any]]()
    for event in events:
        if event.get("event") in STARTS:
            starts, loops = ([], []) if begins_anew(event) else (starts, loops)
            config = event.get("config", {})
            starts.append(
                {name: event.get(name) for name in OF_START}
                | {"options": {name: config.get(name) for name in OPTIONS}}
            )
        elif event.get("event") == "loop":
            loops.append({name: event.get(name) for name in OF_LOOP})
    if not starts:
        raise RecordError(f"{directory} has no record of a run")
    return {
        "format": FORMAT,
        "samestep": samestep_version(),
        "chain": _describe_chain(directory, steps),
        "record": {"bytes": size, "sha256": digest},
        "starts": starts,
        "loops": loops,
        "orders": {path.name: _sha256(path) for path in order_files(directory)},
        "snapshots": _describe_snapshots(directory, steps),
    }


def _read_record(directory: Path, size: int | None) -> tuple[str, list[dict[str, Any]], int]:
    """Return the SHA-256 of the record, its starts and loops, and the bytes of complete lines."""
    digest, done, lines = hashlib.sha256(), 0, list[bytes]()
    path = directory / FILE_NAME
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            for line in read_lines(file):
                if not line.endswith(b"\n") or (size is not None and done >= size):
                    break
                digest.update(line)
                done += len(line)
                if b'"event":"loop"' in line or b'"continues":' in line:
                    lines.append(line)
    except OSError as error:
        raise RecordError(f"cannot read a record at {path}: {error.strerror}") from error
    return digest.hexdigest(), [*parse_events(lines)], done


def _describe_chain(directory: Path, steps: int | None) -> dict[str, Any]:
    with closing(Chain.open(directory)) as chain:
        count = chain.first + len(chain)
        count = count if steps is None else min(steps, count)
        return {
            "first": chain.first,
            "start": chain.start.hex(),
            "seed": chain.seed,
            "steps": count,
            "head": chain.head_after(count).hex(),
        }


def _describe_snapshots(directory: Path, steps: int | None) -> dict[str, Any]:
    """Return the files of each complete snapshot, and what the record says of its state."""
    states, described = snapshots_of(directory), {}
    for path in sorted(directory.glob("step-*")):
        match = SNAPSHOT.fullmatch(path.name)
        if match is None or not (path / MANIFEST).is_file():
            continue
        at = int(match[1])
        if steps is not None and at > steps:  # of the run's later steps
            continue
        state = states.get(at, {})
        files = sorted(each for each in path.iterdir() if each.name != "keep.txt")
        described[path.name] = {
            "step": at,
            "chain": state.get("chain"),
            "state": state.get("digest"),
            "files": {each.name: _sha256(each) for each in files},
        }
    return described


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            while piece := file.read(READ_BYTES):
                digest.update(piece)
    except OSError as error:
        raise SnapshotError(f"cannot read {path}: {error.strerror}") from error
    return digest.hexdigest()


def _to_bytes(receipt: Mapping[str, Any]) -> bytes:
    """Return a receipt with its own digest, as JSON for people and programs."""
    return json.dumps({**receipt, "digest": _digest(receipt)}, indent=1).encode() + b"\n"


def _digest(receipt: Mapping[str, Any]) -> str:
    text = json.dumps(receipt, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def anchor_of(receipt: Mapping[str, Any]) -> str:
    """Return the line that binds a receipt and its chain to the time when it is kept elsewhere."""
    chain = receipt["chain"]
    return f"samestep {chain['steps']} steps {chain['head']} receipt {_digest(receipt)}"


def read(file: Path) -> dict[str, Any]:
    """Return a receipt, whose digest is that of its content. Raises `RecordError`."""
    try:
        receipt = json.loads(read_regular(file, LARGEST, follows_links=True))
        if receipt["format"] != FORMAT:
            text = f"{file} must have format {FORMAT}, got {receipt['format']!r}"
            raise RecordError(f"{text}; install samestep {receipt.get('samestep')} to read it")
        digest = receipt.pop("digest")
        if digest == _digest(receipt) and all(
            isinstance(receipt[part], (dict, list)) for part in PARTS
        ):
            int(receipt["chain"]["steps"]), int(receipt["record"]["bytes"])
            int(receipt["chain"]["first"])
            return dict(receipt)
    except OSError as error:
        raise RecordError(f"cannot read a receipt at {file}: {error.strerror}") from error
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise RecordError(
            f"{file} is no receipt of `samestep receipt make` ({type(error).__name__}: {error})"
        ) from error
    raise RecordError(f"{file} was changed after it was written: its digest is another one")


class Verdicts:
    """Prints what was compared; `differs` says whether anything was not as it should be."""

    def __init__(self) -> None:
        self.differs = False

    def add(self, what: str, problem: str = "") -> None:
        """Print a line about what was compared, with the problem if there is one."""
        self.differs |= bool(problem)
        verdict = colored("DIFFERENT", RED, sys.stdout) if problem else "as it should be"
        verdict = verdict if problem else colored(verdict, GREEN, sys.stdout)
        print(f"{what}: {verdict}" + (f", {problem}" if problem else ""))


def check(
    receipt: Mapping[str, Any], run: Path | None, head: str | None, verdicts: Verdicts
) -> None:
    """Compare a receipt with an anchor and the files of its run, and say what was compared."""
    verdicts.add("the receipt's own digest")  # `read` has refused others
    if head is not None:
        if not HEX.fullmatch(head):
            raise ConfigError(f"--head must be 64 hexadecimal digits, got {head!r}")
        known = {receipt["chain"]["head"], _digest(receipt)}
        problem = (
            "" if head in known else f"neither the head nor the digest of {anchor_of(receipt)}"
        )
        verdicts.add("the anchor", problem)
    if run is not None:
        _check_run(receipt, run, verdicts)
    for line in ([] if head else [NO_ANCHOR]) + ([LEFT] if run else []):
        print(line)


def _check_run(receipt: Mapping[str, Any], run: Path, verdicts: Verdicts) -> None:
    steps, size = int(receipt["chain"]["steps"]), int(receipt["record"]["bytes"])
    first = int(receipt["chain"]["first"])
    begin = f" from step {first} on" * bool(first)
    what = f"all links of the chain, {counted(steps - first, 'step')}{begin}"
    try:
        with closing(Chain.open(run)) as chain:
            chain.check()
            goes_on = chain.first + len(chain) > steps
        verdicts.add(what)
        what = "the files of the run"
        found = make(run, size, steps)
    except SamestepError as error:
        verdicts.add(what, str(error))
        return
    kept, count = _still_kept(receipt, found, goes_on=goes_on)
    gone = f" (not checked: {counted(count, 'snapshot')} that the run has removed since)" * (
        count > 0
    )
    for part, title in (PARTS | {"snapshots": f"snapshots{gone}"}).items():
        verdicts.add(title, _first_difference(kept[part], found[part]))
    verdicts.add("rates of the record and of the chain", _rates_differ(run, steps))


def _still_kept(
    receipt: Mapping[str, Any], found: Mapping[str, Any], *, goes_on: bool
) -> tuple[Mapping[str, Any], int]:
    """Return a receipt without the snapshots that its run has removed, and their number.

    A run that has gone on since then keeps only its newest ones.
    """
    snapshots = receipt["snapshots"]
    kept = {name: each for name, each in snapshots.items() if name in found["snapshots"]}
    if not goes_on or len(kept) == len(snapshots):
        return receipt, 0
    return {**receipt, "snapshots": kept}, len(snapshots) - len(kept)


def _first_difference(was: Any, now: Any, place: str = "") -> str:
    """Return the first place at which two values of JSON differ, "" if they do not."""
    if isinstance(was, list) and isinstance(now, list):
        was, now = ({str(number): own for number, own in enumerate(both)} for both in (was, now))
    if isinstance(was, dict) and isinstance(now, dict):
        keys = sorted({*was, *now})
        inner = (_first_difference(was.get(key), now.get(key), f"{place} {key}") for key in keys)
        return next(filter(None, inner), "")
    texts = ("missing" if own is None else f"{json.dumps(own):.80}" for own in (was, now))
    same = json.dumps(was, sort_keys=True) == json.dumps(now, sort_keys=True)
    return "" if same else f"first in{place}: {' -> '.join(texts)}"


def _rates_differ(run: Path, steps: int) -> str:
    """Return at which step the record has a new learning rate and the chain has not, "" if none."""
    before: dict[str, float] = {}
    with closing(Chain.open(run)) as chain:
        for event in read_history(run):
            step, rates = event.get("step", steps), event.get("rates")
            if event.get("event") != "timing" or not isinstance(rates, dict):
                continue
            changed = [name for name in rates if before.get(name, rates[name]) != rates[name]]
            before |= rates
            is_covered = chain.first < step < steps
            if changed and is_covered and chain[step].rates == chain[step - 1].rates:
                return f"first at step {step}: the record has another rate, and the chain not"
    return ""


def replay(receipt: Mapping[str, Any], options: argparse.Namespace) -> int:
    """Repeat random segments of a run, and compare their rows and the states at their ends."""
    command = command_of(options)
    if options.segments < 1:
        raise ConfigError(f"--segments must be at least 1, got {options.segments}")
    run, verdicts = options.run, Verdicts()
    _check_run(receipt, run, verdicts)
    if verdicts.differs:
        print("nothing was repeated, because the run is not that of the receipt")
        return 1
    segments = segments_of(receipt)
    if not segments:
        raise VerifyError("the receipt has no snapshot after its first step, so nothing to repeat")
    seed = random.randrange(2**32) if options.seed is None else options.seed
    chosen = random.Random(seed).sample(segments, min(options.segments, len(segments)))
    for first, stop in sorted(chosen):
        print(f"repeating steps {first} to {stop - 1} on 1 worker …", file=sys.stderr, flush=True)
        with TemporaryDirectory(prefix="samestep-receipt-") as name:
            problem = _repeat(run, first, stop, command, Path(name))
        verdicts.add(f"steps {first} to {stop - 1}, and the state after them", problem)
    steps = sum(stop - first for first, stop in chosen)
    total = receipt["chain"]["steps"] - receipt["chain"]["first"]
    print(
        f"repeated {len(chosen)} of {counted(len(segments), 'segment')} (--seed {seed}): {steps} of"
        f" {counted(total, 'step')}"
    )
    print(NOT_REPEATED)
    return int(verdicts.differs)


def segments_of(receipt: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return the steps [first, stop) from each snapshot to the next, and from the run's start."""
    ends = {each["step"] for each in receipt["snapshots"].values()}
    chain = receipt["chain"]
    begins = [0] if chain["first"] == 0 and receipt["starts"][0]["event"] == "started" else []
    places = sorted({*begins, *(end for end in ends if end <= chain["steps"])})
    return [*pairwise(places)]


def _repeat(run: Path, first: int, stop: int, command: list[str], folder: Path) -> str:
    """Repeat steps [first, stop) of a run; return what differs, "" if nothing does."""
    record = RecordedRun.read(run, stop - 1)
    record.choose_end(to_next_snapshot=False)
    with started(command, 1, folder, record.flags()) as process:
        status = process.wait()
    ended = "the script ended with status {} before step {}:\n{}"
    try:
        repeated = Chain.open(folder)
    except RecordError:
        return ended.format(status, first, first_failure(folder))
    with closing(repeated), closing(Chain.open(run)) as chain:
        steps = range(max(first, repeated.first), min(stop, repeated.first + len(repeated)))
        if parts := differing_rows(chain, repeated, steps):
            return ", ".join(f"{part} from step {step}" for part, step in parts.items())
        if repeated.first + len(repeated) < stop:
            return ended.format(status, stop, first_failure(folder))
    was, now = record.means, means_of(folder)
    if differing := differing_means(was, {step: now.get(step, {}) for step in range(first, stop)}):
        step, mean = differing[0]
        return f"the logged mean {mean!r} from step {step}"
    from samestep.snapshot.digest import state_digest

    name, recorded = f"step-{stop:08d}", snapshots_of(run).get(stop, {}).get("digest")
    digest = state_digest(run / name)
    if recorded not in {None, digest}:
        return f"the record has another digest of the state after {stop} steps than {name}"
    is_same = digest == state_digest(folder / name)
    return "" if is_same else f"the state after {stop} steps is another one"
