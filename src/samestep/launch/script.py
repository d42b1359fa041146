"""Run a script, or a module as a script, in local workers."""

from __future__ import annotations

import runpy
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.errors import ConfigError
from samestep.launch.local import start

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from samestep.launch.nodes.options import Gathering


def run_script(
    script: str,
    arguments: Sequence[str],
    workers: int,
    options: Mapping[str, Any],
    *,
    as_module: bool = False,
    gathering: Gathering | None = None,
) -> None:
    """Run `python script arguments…` (or `python -m script arguments…`) in `workers` workers of this host, one of several that gather.

    Options and errors are those of `launch`; a script that is not there is a `ConfigError`.
    """
    if not as_module and not Path(script).is_file():
        raise ConfigError(
            f"script {script!r} was given, and there is no such file; expected a Python script, or a module after -m"
        )
    start(
        partial(_run_as_main, script, arguments, as_module=as_module), workers, options, gathering
    )


def _run_as_main(script: str, arguments: Sequence[str], *, as_module: bool) -> None:
    sys.argv = [script, *arguments]
    if as_module:
        sys.path[0] = str(Path.cwd())
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(script).resolve().parent)
        runpy.run_path(script, run_name="__main__")
