"""What watches a run between its steps: plugins, of which progress knows only this protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from samestep.data.batch import Batch
from samestep.metrics import Means
from samestep.step.lane_pass import call_each, overriding


class EndedStep(NamedTuple):
    """A step that has ended: its number in the run and in its loop, both from 1, and its batch."""

    step: int
    loop: str
    done: int
    batch: Batch


class RunPlugin:
    """Watches a run between its steps; all workers have those with notes in the same order.

    A plugin overrides the methods that it needs; the others are not called.
    """

    def begin_loop(self, name: str, planned: Mapping[str, int | None]) -> None:
        """Note the start of a loop; `planned` are its steps, over all resumes, and its data."""

    def begin_step(self, step: int) -> None:
        """Prepare for a step, before its body runs."""

    def add(self, means: Means) -> None:
        """Look at the means of a backward call of the step."""

    def end_step(self, ended: EndedStep) -> None:
        """Look at a step whose body has run."""

    def end_run(self) -> None:
        """Look at what the script has when it ends its run."""

    def state(self, current: EndedStep | None) -> Mapping[str, Any]:
        """Return what a snapshot keeps in the state of the run; only one worker may have a name.

        `current` is the step whose body is about to end, if the snapshot is taken in it.
        """
        return {}

    def expire(self) -> None:
        """Forget what was compared, because user code ran after it."""

    def compare_if_due(self, step: int, *, last: bool = False) -> None:
        """Compare what the workers have after a step. May be collective."""

    def note(self) -> Any:
        """Return JSON that this worker sends with the losses of a step."""

    def receive(self, step: int, notes: Sequence[Any]) -> None:
        """Read the notes of all workers, by rank, during a step."""


class RunPlugins:
    """The plugins of a run, of which each call reaches those that override its method."""

    def __init__(self, plugins: Sequence[RunPlugin]) -> None:
        each = partial(call_each, plugins, RunPlugin)
        self.begin_loop, self.begin_step = each("begin_loop"), each("begin_step")
        self.add, self.end_step = each("add"), each("end_step")
        self.end_run = each("end_run")
        self.expire, self.compare_if_due = each("expire"), each("compare_if_due")
        self._noting = overriding(plugins, RunPlugin, "note")
        self._stateful = overriding(plugins, RunPlugin, "state")

    def state(self, current: EndedStep | None) -> dict[str, Any]:
        """Return what this worker adds to the state of the run."""
        return {
            name: value
            for plugin in self._stateful
            for name, value in plugin.state(current).items()
        }

    def note(self) -> list[Any]:
        """Return the notes of this worker, as JSON."""
        return [plugin.note() for plugin in self._noting]

    def receive(self, step: int, notes: Sequence[Sequence[Any]]) -> None:
        """Let each read its notes of all workers; `notes` are those of `note`, by rank."""
        for plugin, own in zip(self._noting, zip(*notes, strict=True), strict=True):
            plugin.receive(step, own)
