"""What usually causes a difference between two runs: a table, and the choice from it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, Literal, NamedTuple, TypeAlias

SHOWN: Final = 5  # likely causes, or names of variables
LOGGED: Final = "logged "  # the names of scalars that the script computed itself
METRIC: Final = "metric "  # those of the means of `run.backward`
STATISTICS: Final = re.compile(r"running_(mean|var)$|num_batches_tracked$")

CAUSES: Final = {
    # whatever differs
    "steps": "a number of steps that depends on the number of workers",
    "resumed steps": "a variable that counts steps or decides when to stop, which starts over when "
    "the run resumes; use epochs= or steps= of the loop, run.step and run.epoch, or track it",
    "start": "the state before the first step: a model or optimizer built before ss.init, from "
    "random numbers that samestep does not seed, or from data that depends on the number of "
    "workers",
    # only a run that was killed differs
    "variables": "{}: not tracked, so it starts over when the run resumes; pass an object to "
    "run.track, and keep a number in one, or use run.step and run.epoch",
    "untracked": "state that is not tracked and starts over when the run resumes: an object that "
    "is missing in run.track, a variable that counts or keeps the best value or weights, an "
    "attribute of the data set, or a file",
    # only the number of loader processes differs
    "loaders": "a data set that is not the same in loader processes: an attribute or list that the "
    "script changes, a file or connection opened before the loop, or samples that depend on the "
    "order of loads",
    # only whether lanes are CUDA graphs differs
    "graphs": "a lane that reads what a CUDA graph keeps from its capture; see the list in "
    'docs/graphs.md, or use graphs="off"',
    # observed while the script ran; {} is a name
    "generator": "a lane draws from the generator {}, which samestep does not seed; seed it with "
    "run.on_lane_seed",
    "unseeded": "data is drawn with the generator {}, which samestep cannot seed, or which did not "
    "exist before the first draw; use one of Python, NumPy or torch, created with a seed",
    "sample": "two loads of an index from the data set {} give different samples: it counts its "
    "loads, goes on in a file or iterator, or draws from a clock; compute a sample from its index, "
    "or use run.streams",
    "tensors": "{}; it was changed by code that runs on only some workers, such as a forward pass "
    "in training mode or other gradients on rank 0",
    "attribute": "a lane changes the attribute {}, which stays on its worker; if results depend on "
    "it, make it a buffer (register_buffer) or compute it from the batch",
    # by the kind of state that differs
    "logged": "the script computed the value on rank 0, from what its own lanes left in a "
    "variable, or from a clock; return it from the loss function: its values are means over all "
    "lanes",
    "forward": "the forward pass: a random generator created by the script (samestep seeds those "
    "of Python, NumPy and torch), data that depends on the rank, or a different number of threads "
    "per worker",
    "statistics": "a layer that exchanges statistics between workers, such as SyncBatchNorm with "
    "more lanes than workers, or a forward pass in training mode on some workers only",
    "buffer": "a buffer that is more than a mean over lanes, such as a count, a queue or a "
    "minimum, or that code outside of lanes changes on some workers only",
    "plain": "a tracked object that counts what one worker did, or contains a time or path",
    "update": "the gradient or the update: a nondeterministic kernel, a model initialized from "
    "unseeded random numbers, state kept outside of lanes, or gradients changed by one worker only",
}
# observed causes, the likeliest first; those of a forward pass would also change its means
OBSERVED_KINDS: Final = ("generator", "unseeded", "sample", "tensors", "attribute")
OF_FORWARD: Final = frozenset(OBSERVED_KINDS) - {"tensors"}

Between: TypeAlias = Literal["workers", "resume", "loaders", "graphs"]
Values: TypeAlias = Mapping[str, str]  # summaries of a script's variables, by name


class Observation(NamedTuple):
    """A possible cause of differences from `step` on, of a kind in `OBSERVED_KINDS`."""

    step: int
    kind: str
    name: str


@dataclass(frozen=True)
class Difference:
    """The first step after which two runs differ, and the names of what differs.

    `between` says how the runs were made: by other numbers of workers, by a resume after a kill,
    with other loader processes, or with eager lanes instead of CUDA graphs. `same` are the names
    that are equal.
    """

    step: int
    names: Sequence[str]
    same: Collection[str] = ()
    between: Between = "workers"

    @property
    def first(self) -> str:
        """The name to show: that of state, unless only values of the script differ."""
        return next((name for name in self.names if not name.startswith(LOGGED)), self.names[0])


def explain(
    difference: Difference,
    observations: Sequence[Observation] = (),
    *,
    buffers: Collection[str] = (),
    variables: Sequence[str] = (),
) -> list[str]:
    """Return lines with the causes of a difference, the likeliest first.

    `buffers` are the names of buffers in their modules, `variables` those that start over.
    """
    if difference.between == "resume":
        if variables:
            return [_likely("variables", ", ".join(islice(variables, SHOWN)))]
        return [_usual("untracked")]
    if difference.between == "loaders":
        samples = [each for each in observations if each.kind == "sample"]
        return [_likely("sample", each.name) for each in samples[:1]] or [_usual("loaders")]
    if difference.between == "graphs" or difference.step == 0:
        return [_usual("graphs" if difference.between == "graphs" else "start")]
    if all(name.startswith(LOGGED) for name in difference.names):
        return [_usual("logged")]
    likely = [_likely(each.kind, each.name) for each in _relevant(difference, observations)]
    return list(islice(dict.fromkeys(likely), SHOWN)) or [
        _usual(_kind_of(difference.first, buffers))
    ]


def _relevant(difference: Difference, observations: Sequence[Observation]) -> Iterator[Observation]:
    """Yield what may have caused a difference between numbers of workers, the likeliest first."""
    differ = any(name.startswith(METRIC) for name in difference.names)
    has_same_means = not differ and any(name.startswith(METRIC) for name in difference.same)
    for kind in OBSERVED_KINDS:
        for each in observations:
            is_early = each.kind == kind and each.step <= difference.step
            if is_early and not (has_same_means and kind in OF_FORWARD):
                yield each


def starting_over(
    runs: Mapping[str, Mapping[int, Values]], size: str, step: int, resumed: Values
) -> list[str]:
    """Return the variables that a resumed run of this size has as at its start, not as at `step`.

    `runs` has the variables by step of the runs that were not killed, which must agree. Of those
    that have other values, the first ones are those that have exactly the values of the start.
    """
    expected, start = runs[size].get(step, {}), runs[size].get(0, {})
    others = [run.get(step, {}) for run in runs.values()]
    lost = [
        name
        for name, value in expected.items()
        if resumed.get(name, value) != value and all(other.get(name) == value for other in others)
    ]
    as_at_start = [name for name in lost if resumed[name] == start.get(name)]
    first: dict[str, str] = {}  # by the variable that holds them
    for name in [*as_at_start, *lost]:
        first.setdefault(re.split(r"[.\[:]", name)[0], name)
    return list(first.values())


def _kind_of(name: str, buffers: Collection[str]) -> str:
    if name.startswith(METRIC):
        return "forward"
    if name.startswith("plain state"):
        return "plain"
    if STATISTICS.search(name):
        return "statistics"
    return "buffer" if name.partition("/")[2] in buffers else "update"


def _likely(cause: str, name: str) -> str:
    return f"Likely cause: {CAUSES[cause].format(name)}"


def _usual(cause: str) -> str:
    return f"Usual cause: {CAUSES[cause]}"
