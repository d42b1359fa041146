"""Rules for buffers that lanes write: which value a buffer has after the step.

Lanes that wrote the same bits need no rule. If they wrote different ones, a rule says how these
become one value. Those of common modules are known; all others have to be chosen, because no value
is right for a counter, a range, a running mean and a queue alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, Final, Literal, NamedTuple, get_args

from torch import Tensor
from torch.nn import Module

from samestep.errors import ConfigError, ModelError
from samestep.torch_internals import buffers_in, parameters_in

Rule = Literal["mean", "sum", "min", "max", "first", "refuse"]

RULES: Final = get_args(Rule)
# of any class: running statistics of normalization layers, in torch and elsewhere
BY_NAME: Final[Mapping[str, Rule]] = {
    "running_mean": "mean",
    "running_var": "mean",
    "num_batches_tracked": "first",
}
# by a class of the module, all of torch. Observers keep ranges, or moving averages of ranges: the
# smallest average of lanes is that with the smallest value of the batch. Fake quantization computes
# its scales from these ranges, see `set_scale`.
BY_CLASS: Final[Mapping[str, Mapping[str, Rule]]] = {
    "ObserverBase": {"min_val": "min", "max_val": "max"},
    "FakeQuantizeBase": {"scale": "first", "zero_point": "first"},
    "_SpectralNorm": {"_u": "first", "_v": "first"},
}


class Home(NamedTuple):
    """Where a buffer is registered: a dict of its module, and its name there and in the model."""

    registry: dict[str, Any]
    name: str
    path: str
    rule: Rule | None

    def holds_shape_of(self, start: Tensor) -> bool:
        """Return whether the buffer has the shape and dtype of `start` now."""
        value = self.registry.get(self.name)
        return value is not None and value.shape == start.shape and value.dtype == start.dtype


def check_rules(module: Module, rules: Mapping[str, Rule]) -> None:
    """Raise `ConfigError` for a rule that does not exist, and `ModelError` for one without use."""
    names = dict(module.named_buffers())
    for pattern, rule in rules.items():
        if rule not in RULES:
            raise ConfigError(
                f"the rule of a buffer must be one of {', '.join(RULES)}, got {rule!r} for"
                f" {pattern!r}"
            )
        matches = {name: tensor for name, tensor in names.items() if fnmatchcase(name, pattern)}
        if not matches:
            raise ModelError(
                f"buffers has a rule for {pattern!r}, but {type(module).__name__} has only the"
                f" buffers {', '.join(names) or '(none)'}"
            )
        for name, tensor in matches.items():
            if not _suits(rule, tensor):
                raise ModelError(
                    f"the buffer {name!r} is {tensor.dtype}, for which there is no rule {rule!r}"
                )


def _suits(rule: Rule, tensor: Tensor) -> bool:
    if rule == "mean":
        return tensor.is_floating_point()
    return rule in {"first", "refuse"} or not tensor.is_complex()


def rule_of(owner: Module, name: str, path: str, rules: Mapping[str, Rule]) -> Rule | None:
    """Return the rule of a buffer of `owner`, `path` in the replicated module; None if unknown."""
    if rule := chosen_rule(path, rules):
        return rule
    for kind in type(owner).__mro__:
        if name in BY_CLASS.get(kind.__name__, {}):
            return BY_CLASS[kind.__name__][name]
    # torch.nn.utils.spectral_norm, which is a hook of the layer
    stem, _, end = name.rpartition("_")
    if end in {"u", "v"} and f"{stem}_orig" in parameters_in(owner):
        return "first"
    rule, buffer = BY_NAME.get(name), buffers_in(owner)[name]
    return rule if rule and buffer is not None and _suits(rule, buffer) else None


def chosen_rule(path: str, rules: Mapping[str, Rule]) -> Rule | None:
    """Return the rule of the first pattern that matches."""
    return next((rule for pattern, rule in rules.items() if fnmatchcase(path, pattern)), None)


def has_scale(module: Module) -> bool:
    """Return whether a module has a scale that follows from the ranges of its observer."""
    return any(kind.__name__ == "FakeQuantizeBase" for kind in type(module).__mro__)


def set_scale(module: Any) -> None:
    """Compute the scale again as the module's forward does, from ranges over all lanes."""
    scale, zero_point = module.calculate_qparams()
    module.scale.copy_(scale)
    module.zero_point.copy_(zero_point)
