"""Which samples the steps of a run have used, from its record alone: nothing is trained or loaded.

A run records what makes the plan of each loop, and every start. Steps that a later start repeated
count once, as that start made them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from samestep.data.mixture_plan import MixturePlan
from samestep.data.orders import ByLength, ShardOrder, Weighted, make_plan
from samestep.data.plan import Indices, Plan
from samestep.errors import ConfigError, RecordError
from samestep.record import read_events
from samestep.record.orders import read_order
from samestep.record.source import STARTS, begins_anew
from samestep.tools import damage_explained

COMPLETE: Final = {"timing": 1, "snapshot": 0, "stopped": 0, "finished": 0}  # steps after `step`
WITHIN: Final = {"scalars", "loop", "order", "shares", "batch_skipped", "loss_alert", "failed"}
EARLIER: Final = (
    "loop {!r} was recorded by an earlier version of samestep, which did not record the plan; only"
    " steps of newer versions can be looked up"
)
STREAM: Final = (
    "loop {!r} reads streams, whose items have no numbers: what a step has used depends on what the"
    " stream returned. Choose another loop by --loop, if there is one"
)
NOT_KEPT: Final = (
    "the order of epoch {} of loop {!r} is not in the record, which keeps at most 1 GiB of orders"
)


class Use(NamedTuple):
    """A use of a sample: the step of the run, its loop, epoch and lane, and the sample's index."""

    step: int
    loop: str
    epoch: int
    lane: int
    sample: int


@dataclass(frozen=True)
class Stretch:
    """Consecutive steps [first, stop) of a run that one start made of one epoch of a loop.

    The first one is step `epoch_step` of the epoch. `start` counts the starts in the record from 0.
    `recorded` is what the record has of the plan, None for streams; `plan` makes it.
    """

    loop: str
    epoch: int
    first: int
    stop: int
    epoch_step: int
    start: int
    recorded: Mapping[str, Any] | None
    plan: Callable[[], Plan] = field(repr=False, compare=False)

    @property
    def steps(self) -> range:
        """The steps within the epoch."""
        return range(self.epoch_step, self.epoch_step + self.stop - self.first)

    def uses(self, samples: Indices) -> list[Use]:
        """Return where the steps use some different samples, in order."""
        plan, size = self.plan(), sum(sizes_of(self.recorded).values())
        kept = np.setdiff1d(samples[samples < size], plan.excluded)
        rows = plan.uses(self.epoch, kept, self.steps).tolist()
        shift = self.first - self.epoch_step
        return [Use(shift + step, self.loop, self.epoch, lane, row) for step, lane, row in rows]


@dataclass
class _Pass:
    """An iteration of a loop by a start: its event, and its steps [first, stop) of the run."""

    event: Mapping[str, Any]
    start: int
    first: int
    stop: int = 0


class History:
    """The steps of a run that count, as stretches in order.

    `first` is the first step that this record has, after 0 if the run began with a snapshot of
    another one, `origin`. `starts` are the starts' events, and `skipped` the steps without update.
    `trunks` has the names of the runs that it is a fork of, by their ids.
    """

    def __init__(self, directory: Path) -> None:
        """Read a record. Raises `RecordError` if there is none, or it is damaged."""
        self.directory = directory
        self.starts: list[Mapping[str, Any]] = []
        self.trunks: dict[str, str] = {}
        self.first, self.origin = 0, ""
        self.skipped: set[int] = set()
        self._passes: list[_Pass] = []
        self._orders: dict[tuple[str, int], Mapping[str, Any]] = {}
        self._shares: list[Mapping[str, Any]] = []
        self._end = 0
        with damage_explained(directory):
            for event in read_events(directory):
                self._add(event)
            self._end_pass(self._end)
            self.stretches = [*self._cut()]
        if not self.starts:
            raise RecordError(f"{directory} has no record of a run")

    @property
    def end(self) -> int:
        """The number of steps that the run has made."""
        return self._end

    def _add(self, event: Mapping[str, Any]) -> None:
        kind, step = event.get("event"), event.get("step")
        if not isinstance(step, int):
            return
        if kind in STARTS:
            self._end_pass(min(self._end, step))
            self._forget(step, event)
            self.starts.append(event)
            self._end = step
        elif kind in COMPLETE or kind in WITHIN:
            self._end = max(self._end, step + COMPLETE.get(str(kind), 0))
        if kind == "loop":
            self._end_pass(step)
            self._passes.append(_Pass(event, len(self.starts) - 1, step))
        elif kind == "order":
            self._orders[str(event["loop"]), int(event["epoch"])] = event
        elif kind == "shares":
            self._shares.append(event)
        elif kind == "batch_skipped":
            self.skipped.add(step)
        elif kind == "forked":
            self.trunks[str(event.get("run"))] = Path(str(event.get("trunk"))).name

    def _forget(self, step: int, start: Mapping[str, Any]) -> None:
        """Forget what steps from `step` on have recorded, or all if another history begins."""
        kept = step
        if begins_anew(start):
            kept, self._orders = -1, {}
            self.first, self.origin = step, str(start.get("snapshot") or "")
        self._passes = [each for each in self._passes if each.first < kept]
        self._shares = [each for each in self._shares if each["step"] < kept]
        self.skipped = {each for each in self.skipped if each < kept}
        for each in self._passes:
            each.stop = min(each.stop, step)

    def _end_pass(self, step: int) -> None:
        if self._passes and not self._passes[-1].stop:
            self._passes[-1].stop = step

    def _cut(self) -> Iterator[Stretch]:
        """Yield the epochs of all passes."""
        for each in self._passes:
            event, first = each.event, each.first
            loop, epoch, size = str(event["name"]), int(event["epoch"]), event["steps_per_epoch"]
            epoch_step, recorded = int(event.get("epoch_step", 0)), event.get("plan")
            # all epochs of a mixture go on from what its sources had given
            mixture = lru_cache(1)(partial(self._mixture_of, event))
            while first < each.stop:
                count = each.stop - first if size is None else int(size) - epoch_step
                stop = min(each.stop, first + max(1, count))
                is_mixture = recorded is not None and recorded["kind"] == "mixture"
                plan = mixture if is_mixture else partial(self._plan_of, event, epoch)
                place = (loop, epoch, first, stop, epoch_step, each.start)
                yield Stretch(*place, recorded, plan)
                first, epoch, epoch_step = stop, epoch + 1, 0

    def _mixture_of(self, event: Mapping[str, Any]) -> Plan:
        plan = _mixture(event, [of for of in self._shares if of["loop"] == event["name"]])
        return _without(plan, event["plan"], self.directory)

    def _plan_of(self, event: Mapping[str, Any], epoch: int) -> Plan:
        recorded, loop = event.get("plan"), str(event["name"])
        if recorded is None:
            is_stream = event.get("steps_per_epoch") is None
            raise RecordError((STREAM if is_stream else EARLIER).format(loop))
        order = self._orders.get((loop, epoch))
        if order is not None and not order["kept"]:
            raise RecordError(NOT_KEPT.format(epoch, loop))
        digest = "" if order is None else str(order["digest"])
        return _plan(json.dumps(recorded), self.directory, digest)

    def at(self, step: int) -> Stretch:
        """Return the stretch with a step. Raises `ConfigError` if the record has none."""
        for stretch in self.loops():
            if stretch.first <= step < stretch.stop:
                return stretch
        before = f"; steps before {self.first} are those of {self.origin}" * bool(self.origin)
        expected = f"a step from {self.first} to {max(self.first, self.end - 1)}"
        raise ConfigError(f"--step must be {expected}, as in the record, got {step}{before}")

    def loops(self, name: str | None = None) -> list[Stretch]:
        """Return the stretches of a loop, or of all. Raises `ConfigError` if there is none."""
        if not self.stretches:
            raise ConfigError(f"the run in {self.directory} has made no step")
        found = [each for each in self.stretches if name in {None, each.loop}]
        if not found:
            names = ", ".join(sorted({each.loop for each in self.stretches}))
            raise ConfigError(f"the run has made no step of loop {name!r}; its loops are: {names}")
        return found


def uses(history: History, samples: Sequence[int], loop: str | None = None) -> Iterator[Use]:
    """Yield where a run has used samples, in the order of its steps.

    Raises `RecordError` where the record cannot tell, such as for streams, and `ConfigError` for a
    sample or a loop that the run does not have.
    """
    stretches = history.loops(loop)
    size = max(sum(sizes_of(each.recorded).values()) for each in stretches)
    if wrong := [sample for sample in samples if not 0 <= sample < (size or 2**63)]:
        expected = f"a sample must be from 0 to {size - 1}, as in the data"
        raise ConfigError(f"{expected}, got {wrong[0]}")
    indices = np.unique(np.asarray(samples, dtype=np.int64))
    for stretch in stretches:
        yield from stretch.uses(indices)


def sizes_of(recorded: Mapping[str, Any] | None) -> dict[str, int]:
    """Return the samples of each source of a plan; a single one has no name."""
    if recorded is None:
        return {}
    return dict(recorded["sizes"]) if "sizes" in recorded else {"": int(recorded["size"])}


def first_rows(recorded: Mapping[str, Any] | None) -> dict[str, int]:
    """Return the index of each source's first row."""
    sizes = sizes_of(recorded)
    return dict(zip(sizes, accumulate([0, *sizes.values()]), strict=False))


@lru_cache(4)  # a plan may have an array of all samples
def _plan(text: str, directory: Path, digest: str) -> Plan:
    """Make the plan of a loop with one data set again, from JSON and an array of the record."""
    recorded = json.loads(text)
    return _without(_whole_plan(recorded, directory, digest), recorded, directory)


def _without(plan: Plan, recorded: Mapping[str, Any], directory: Path) -> Plan:
    """Return a plan without the samples that were left out."""
    if digest := recorded.get("exclude"):
        plan.exclude(read_order(directory, str(digest)))
    return plan


def _whole_plan(recorded: Mapping[str, Any], directory: Path, digest: str) -> Plan:
    kind, size = recorded["kind"], int(recorded["size"])
    sizes = size, recorded["batch_size"], recorded["lanes"], recorded["seed"]
    options = {"shuffle": recorded["shuffle"], "drop_last": recorded.get("drop_last", False)}
    if kind == "shuffled":
        return make_plan(*sizes, **options, group_by=None, order=None)
    array = read_order(directory, digest)
    if kind == "weighted":
        plan = make_plan(*sizes, **options, group_by=None, order=Weighted(np.ones(size)))
        plan.use_array(array)
        return plan
    if kind == "grouped":
        return make_plan(*sizes, **options, group_by=array, order=None)
    if kind == "by length":
        lengths = ByLength(array, max_tokens=recorded["max_tokens"])
        return make_plan(size, None, *sizes[2:], **options, group_by=None, order=lengths)
    order = ShardOrder(array, recorded["window"]) if kind == "shards" else array
    return make_plan(*sizes, **options, group_by=None, order=order)


def _mixture(event: Mapping[str, Any], chosen: Sequence[Mapping[str, Any]]) -> MixturePlan:
    """Make the plan of a mixture again, at the step with which a pass begins."""
    recorded, done, steps_per_epoch = event["plan"], int(event["done"]), event["steps_per_epoch"]

    def newest(number: int) -> Mapping[str, Any]:
        return max((of for of in chosen if of["number"] <= number), key=lambda of: of["number"])

    def shares(number: int) -> Mapping[str, float]:
        return dict(newest(number)["shares"])

    def batch_size(number: int) -> int:
        return int(newest(number)["batch_size"])

    plan = MixturePlan(
        recorded["sizes"],
        batch_size if recorded["batch_size"] is None else recorded["batch_size"],
        recorded["lanes"],
        recorded["seed"],
        weights=shares if recorded["shares"] is None else recorded["shares"],
        shuffle=recorded["shuffle"],
    )
    number = int(event["epoch"]) * steps_per_epoch + int(event["epoch_step"])
    plan.begin(recorded["given"], done, number, steps_per_epoch)
    return plan
