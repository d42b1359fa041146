"""Python, torch and NumPy, samestep's own variables, and which of its extras are installed."""

from __future__ import annotations

import platform
import re
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version
from typing import TYPE_CHECKING, Any, Final

from samestep.config import PREFIX, TOKEN, is_url, merge
from samestep.errors import ConfigError
from samestep.tools.doctor.section import Section, change, good, note

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from samestep.tools.doctor.case import Case
    from samestep.tools.doctor.section import Finding

INTERNAL: Final = f"{PREFIX}INTERNAL_"
EXTRAS: Final = (
    "images",
    "metrics",
    "remote",
    "s3",
    "kubernetes",
    "watch",
    "plot",
    "tensorboard",
    "mlflow",
    "wandb",
)
_REQUIREMENT: Final = re.compile(
    r"""([A-Za-z0-9._-]+)(?:\[([^\]]*)\])?.*?extra\s*==\s*["']([^"']+)["']"""
)


def examine(case: Case) -> Section:
    """Tell of programs."""
    torch, lacking = case.torch, lacking_by_extra()
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
            extra: "installed" if not missing else f"lacks {', '.join(missing)}"
            for extra, missing in lacking.items()
        },
        "variables": _variables(case.system.environment),
    }
    return Section(
        "software",
        facts,
        [*_judge_torch(case), *_judge_variables(case.system.environment, lacking)],
    )


def lacking_by_extra() -> dict[str, list[str]]:
    """Return which packages each extra of samestep lacks here."""
    try:
        lines = requires("samestep") or []
    except PackageNotFoundError:  # run from its sources
        lines = []
    needed: dict[str, list[str]] = {extra: [] for extra in EXTRAS}
    for line in lines:
        if (found := _REQUIREMENT.match(line)) and found[3] in needed:
            needed[found[3]] += (
                found[2].split(",") if found[1] == "samestep" and found[2] else [found[1]]
            )
    packages = {
        extra: [part for name in names for part in needed.get(name, [name])]
        for extra, names in needed.items()
    }
    return {
        extra: [name for name in names if _version(name) is None]
        for extra, names in packages.items()
    }


@cache
def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return samestep's variables, without their internal ones and without the secret."""
    names = sorted(
        name for name in environment if name.startswith(PREFIX) and not name.startswith(INTERNAL)
    )
    return {name: "set" if name == TOKEN else environment[name] for name in names}


def _judge_torch(case: Case) -> Iterator[Finding]:
    if case.failure:
        yield change(
            f"torch could not be tried here: {case.failure}.",
            "python -c 'import torch.distributed' says more; pip install torch",
        )
    elif case.torch and "gloo" not in case.torch.get("backends", ()):
        yield change(
            "this torch has no gloo, by which workers of several hosts exchange small messages.",
            "pip install torch, from PyPI or pytorch.org",
        )
    elif case.torch:
        yield good(
            f"torch {case.torch.get('version')} has {', '.join(case.torch.get('backends', ()))}"
        )


def _judge_variables(
    environment: Mapping[str, str], lacking: Mapping[str, Sequence[str]]
) -> Iterator[Finding]:
    try:
        config = merge({}, environment)
    except ConfigError as error:
        yield change(
            f"samestep.init would fail here: {error}.",
            "unset the variable that it names, or mend it",
        )
        return
    remote = [text for text in (config.remote, config.resume) if text is not None and is_url(text)]
    extra = "s3" if any(text.startswith("s3:") for text in remote) else "remote"
    if remote and lacking[extra]:
        yield change(
            f"{remote[0]} was given as a variable, and {', '.join(lacking[extra])} is not installed.",
            f'pip install "samestep[{extra}]"',
        )
    if missing := [name for name, packages in lacking.items() if packages]:
        yield note(
            f"extras that are not installed: {', '.join(missing)}.",
            f'pip install "samestep[{",".join(missing)}]" for those you want',
        )
