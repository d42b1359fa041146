"""`samestep compare`: the first step at which two runs part, and what differs there first."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from samestep.errors import ConfigError, RecordError, SnapshotError, VerifyError
from samestep.host import GREEN, RED, colored, counted, interrupts_deferred, printable
from samestep.record import read_history
from samestep.record.chain import Chain, origin, snapshots_of
from samestep.record.source import STARTS
from samestep.terminal import starting
from samestep.tools import first_of
from samestep.tools.replay import OPTIONS

PARTS: Final = ("program", "samples", "rates", "losses")  # each may cause those after it
OF_PROGRAM: Final = ("file ", "option lanes", "option precision", "option exchange_dtype")
LONGEST: Final = 100  # characters of a value
SHOWN: Final = 12  # lines about one part
UNNAMED: Final = {
    "program": "a module that was imported after the start, a dtype that the script sets, or the"
    " length of the data set",
    "samples": "the order, the weights, the samples left out, or the position in the data",
    "rates": "an option of an optimizer other than its largest learning rate, or its updates",
    "losses": "what has no digest: the values of samples or of parameters at the start, or what the"
    " list below has",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `samestep compare` to its parser."""
    parser.add_argument("first", type=Path, metavar="A", help="directory of a run")
    parser.add_argument("second", type=Path, metavar="B", help="directory of another run")
    replay = (
        "also repeat the step of both on one worker each, and name the first value that differs"
    )
    parser.add_argument("--replay", action="store_true", help=replay)


def main(options: argparse.Namespace) -> int:
    """Compare two runs; return 0 if they are the same as far as both go, and 1 if they part.

    Raises `ConfigError`, whose status is 2, if they cannot be compared or repeated.
    """
    directories = [options.first, options.second]
    try:
        with ExitStack() as opened:
            chains = [opened.enter_context(closing(Chain.open(path))) for path in directories]
            for name, path, chain in zip("AB", directories, chains, strict=True):
                last = f"{chain.first} to {chain.first + len(chain) - 1}" if len(chain) else "none"
                print(f"{name}: {path}, {counted(len(chain), 'step')}, {last}")
            parting = find_parting(directories, chains)
            if parting is not None and options.replay:
                step = first_effect(parting, chains)
        if parting is None:
            print(colored("the same", GREEN, sys.stdout), "at every step that both have")
            return 0
        print(colored("DIFFERENT", RED, sys.stdout), parting.text)
        for line in _lines_about(parting, [Context.at(path, parting.step) for path in directories]):
            print(line)
        if options.replay:
            with starting(), interrupts_deferred():
                from samestep.tools.values import first_value
            print(f"first other value: {first_value(directories, step)}")
    except (RecordError, SnapshotError, VerifyError) as error:
        raise ConfigError(str(error)) from error
    return 1


@dataclass(frozen=True)
class Parting:
    """Where two runs part: in `parts` of the row of a step, or else as `lines` say.

    If it `is_state`, it is the state after the step, whose rows are the same.
    """

    text: str
    step: int
    parts: Sequence[str] = ()
    lines: Sequence[str] = ()
    is_state: bool = False


def find_parting(directories: Sequence[Path], chains: Sequence[Chain]) -> Parting | None:
    """Return where two runs part, None if they do not. Raises `ConfigError` without a common step.

    Rows do not cover the values of parameters, which a run may change after its updates. So the
    digests of snapshots are compared as well.
    """
    first = max(chain.first for chain in chains)
    end = min(chain.first + len(chain) for chain in chains)
    if first > end or end == 0:
        raise ConfigError("the runs have no step in common; compare runs of the same steps")
    if chains[0].seed != chains[1].seed:
        return Parting(_differ("in their seeds", *(chain.seed for chain in chains)), first)
    for path, chain in zip(directories, chains, strict=True):
        if chain.first > min(each.first for each in chains) and chain.start == origin(chain.seed):
            raise ConfigError(
                f"the chain in {path} begins at step {chain.first}, with a snapshot of an earlier"
                " version of samestep, which has no head, so it cannot be compared with one that"
                f" begins earlier; repeat the steps before {chain.first} with this version"
            )
    step = parting_step(chains, first, end)
    common = [snapshots_of(path) for path in directories]
    for at in sorted(common[0].keys() & common[1].keys()):
        is_before = at <= (end if step is None else step)
        if is_before and common[0][at].get("digest") != common[1][at].get("digest"):
            text = f"in the state after {counted(at, 'step')}, which have the same rows"
            lines = _differing_state(directories, at)
            return Parting(text, max(at - 1, 0), lines=lines, is_state=True)
    if step is None:
        return None
    if step < first:
        return Parting(f"before step {first}, the first one that both have", first)
    rows = [chain[step] for chain in chains]
    parts = [part for part in PARTS if getattr(rows[0], part) != getattr(rows[1], part)]
    if not parts:
        return Parting(f"in the heads of step {step} only: one of the files was changed", step)
    return Parting(f"from step {step} on, first in its {parts[0]}", step, parts)


def parting_step(chains: Sequence[Chain], first: int, end: int) -> int | None:
    """Return the first step in [first, end) whose heads differ, first - 1 if those before do.

    All heads after it differ as well, so that reading a few of them is enough.
    """
    low, high = first, end + 1  # numbers of steps: the first one with other heads is in [low, high]
    while low < high:
        middle = (low + high) // 2
        if chains[0].head_after(middle) == chains[1].head_after(middle):
            low = middle + 1
        else:
            high = middle
    return None if low > end else low - 1


def first_effect(parting: Parting, chains: Sequence[Chain]) -> int:
    """Return the first step of two runs that differs in more than the text of its program."""
    step, end = parting.step, min(chain.first + len(chain) for chain in chains)
    while not parting.is_state and step < end - 1:
        rows = [chain[step] for chain in chains]
        if any(getattr(rows[0], part) != getattr(rows[1], part) for part in PARTS[1:]):
            break
        step += 1
    return step


def _differing_state(directories: Sequence[Path], steps: int) -> list[str]:
    """Return a line with the first name in two snapshots with other bits, none if one is gone."""
    from samestep.snapshot.read import directory_name
    from samestep.tools.trace import differing_state

    names: list[str] = []
    with suppress(SnapshotError):
        names = differing_state([path / directory_name(steps) for path in directories])
    return [f"state: {first_of(names)}"] if names else []


@dataclass
class Context:
    """What the record of a run says of a step: its start, loop, learning rates and means.

    `run` is its id, and `trunks` has those of the runs that it is a fork of, with their names and
    the numbers of steps.
    """

    run: Any = None
    trunks: dict[Any, tuple[str, int]] = field(default_factory=dict)
    start: Mapping[str, Any] = field(default_factory=dict)
    loop: Mapping[str, Any] = field(default_factory=dict)
    rates: dict[str, Any] = field(default_factory=dict)
    means: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def at(cls, directory: Path, step: int) -> Context:
        """Read the record of a run, which may be missing."""
        context = cls()
        with suppress(RecordError):
            for event in read_history(directory):
                number, kind = event.get("step"), event.get("event")
                if not isinstance(number, int):
                    continue
                if kind == "forked":
                    name = Path(str(event.get("trunk"))).name
                    context.trunks[event.get("run")] = name, number
                if kind in STARTS:
                    context.run = event.get("run")
                if number > step:
                    continue
                if kind in STARTS:
                    context.start = event
                elif kind == "loop":
                    context.loop = event
                elif kind == "timing":
                    context.rates |= event.get("rates", {})
                elif kind == "scalars" and number == step and not event.get("between"):
                    context.means |= event["values"]
        return context

    @property
    def program(self) -> dict[str, Any]:
        """The files, inputs and environment of the start, and the options of its results."""
        environment, config = (self.start.get(name) or {} for name in ("environment", "config"))
        options = {name: config[name] for name in OPTIONS if name in config}
        return {**environment, **{f"option {name}": value for name, value in options.items()}}


def _lines_about(parting: Parting, contexts: Sequence[Context]) -> Iterator[str]:
    """Yield what differs in a step, and in the records of its runs."""
    yield from _forked(*contexts)
    yield from parting.lines
    programs = [context.program for context in contexts]
    found = {
        "program": _pairs(*({n: p[n] for n in p if n.startswith(OF_PROGRAM)} for p in programs)),
        "samples": _pairs(*(_sizes_of(context.loop) for context in contexts)),
        "rates": _pairs(*(context.rates for context in contexts)),
        "losses": _pairs(*(context.means for context in contexts)),
    }
    for part in parting.parts:
        yield f"{part}:"
        yield from [f"  {line}" for line in found[part][:SHOWN] or [f"perhaps {UNNAMED[part]}"]]
    shown = found["program"] if "program" in parting.parts else []
    if others := [line for line in _pairs(*programs) if line not in shown]:
        yield "other differences of their starts:"
        yield from [f"  {line}" for line in others[:SHOWN]]


def _forked(a: Context, b: Context) -> Iterator[str]:
    """Yield a line if one of two runs is a fork of the other one, or both are of a third."""
    for name, fork, of, trunk in (("A", a, "B", b), ("B", b, "A", a)):
        if trunk.run in fork.trunks:
            yield f"{name} is a fork of {of}, from step {fork.trunks[trunk.run][1]} on"
            return
    for run in [run for run in reversed(a.trunks) if run in b.trunks][:1]:
        (name, first), (_, second) = a.trunks[run], b.trunks[run]
        yield f"both are forks of {printable(name)}, from steps {first} and {second} on"


def _sizes_of(loop: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a loop's event says of its samples, with the digest of those left out."""
    names = ("name", "samples", "batch_size", "steps_per_epoch")
    left_out = (loop.get("plan") or {}).get("exclude")
    return {**{name: loop.get(name) for name in names}, "exclude": left_out}


def _pairs(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Return a line for each name whose values differ, or that only one has."""
    return [
        _differ(printable(str(name)), first.get(name), second.get(name))
        for name in {**first, **second}
        if repr(first.get(name)) != repr(second.get(name))
    ]


def _differ(what: str, first: Any, second: Any) -> str:
    texts = ("nothing" if value is None else str(value)[:LONGEST] for value in (first, second))
    return "{}: {} in A, {} in B".format(what, *map(printable, texts))
