"""Settings of optimizers and schedules that changed since the snapshot of a resumed run.

`run.track` restores learning rates and other options with the state, so changed settings would do
nothing. They are applied again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import samestep as ss
from recipes.settings import SettingsError

# what settings decide, in parameter groups and in torch's schedulers; the rest is their position
NAMES = {
    "initial_lr": "learning rate",
    "weight_decay": "weight decay",
    **{name: name for name in ("betas", "eps", "momentum")},
    **{name: name for name in ("base_lrs", "eta_min", "factor")},
    **{name: name for name in ("lr_lambdas", "step_size", "T_max", "patience")},
}
# what only one kind of optimizer or schedule has
KINDS = ("betas", "momentum", "lr_lambdas", "step_size", "T_max", "patience")


@contextmanager
def settings_applied(run: ss.Run, *trained: Any) -> Iterator[None]:
    """Keep the options of optimizers and schedulers in a block that restores their state.

    Changes are printed. A learning rate is scaled by the change of its peak, so that its schedule
    goes on. Raises `SettingsError` if the snapshot has another kind of optimizer or schedule.
    """
    for place in _places(trained):
        if "lr" in place:
            place.setdefault("initial_lr", place["lr"])  # as schedulers do, to compare it later
    wanted = [{name: place[name] for name in NAMES if name in place} for place in _places(trained)]
    yield
    changes: dict[str, None] = {}  # in order
    for place, options in zip(_places(trained), wanted, strict=True):
        if any((name in place) != (name in options) for name in KINDS):
            raise SettingsError(
                f"the snapshot of step {run.step} has another kind of optimizer or learning rate "
                "schedule than the settings; set the same optimizer and schedule as before, or "
                "start a new run with another --dir"
            )
        changes |= dict.fromkeys(_apply(place, options))
    for each in trained:
        if changes and hasattr(each, "_last_lr"):  # of a scheduler, for the record
            each._last_lr = [group["lr"] for group in each.optimizer.param_groups]  # noqa: SLF001
    if changes:
        run.print(f"changed at step {run.step}, and used from here on: {', '.join(changes)}")


def _places(trained: tuple[Any, ...]) -> list[dict[str, Any]]:
    """Return the parameter groups of optimizers, and the attributes of schedulers."""
    return [place for each in trained for place in getattr(each, "param_groups", [vars(each)])]


def _apply(place: dict[str, Any], options: Mapping[str, Any]) -> Iterator[str]:
    """Set options to their values in the settings, and yield what changes."""
    for name, new in options.items():
        old = place.get(name, new)
        if _plain(old) == _plain(new):
            continue
        place[name] = new
        if name == "initial_lr":
            place["lr"] *= new / old
        if name != "base_lrs":  # the same as in groups
            yield f"{NAMES[name]} {old} -> {new}"


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
