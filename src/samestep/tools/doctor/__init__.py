"""`samestep doctor`: describe this machine, measure it, and list problems with their fixes."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from samestep.config import PREFIX
from samestep.errors import ConfigError
from samestep.host import GREEN, RED, colored
from samestep.tools import format_bytes, some
from samestep.tools.doctor.cluster import examine_directory, examine_launchers, examine_links
from samestep.tools.doctor.resources import (
    examine_limits,
    examine_memory,
    examine_processors,
    usable_cores,
)
from samestep.tools.doctor.software import examine_gpus, examine_software, find_gpus
from samestep.tools.doctor.system import Case, Finding, Section, System, good, note, problem

MEGABYTE: Final = 1_000_000  # smaller messages measure latency, not bandwidth
PROBE_SECONDS: Final = 60.0  # for all measurements, which usually take a tenth of it
STOP_SECONDS: Final = 5.0
SLOW_WRITE: Final = 100e6  # bytes per second: a snapshot of 1 GB takes over ten seconds
SLOW_SYNC_SECONDS: Final = 0.05  # a snapshot waits for several of them
SLOW_IMPORT_SECONDS: Final = 15.0
WRITE, SYNC, IMPORT = "file written and synced", "small file written and synced", "import of torch"
EXCHANGE, ALL_REDUCE = "exchange of gradients", "all-reduce by gloo"
SEVERITIES: Final = ("problem", "note", "good")  # the most urgent first


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `samestep doctor` to its parser."""
    parser.epilog = "Exit status: 0 if no problem was found, 1 otherwise."
    directory = "directory of the run (default: SAMESTEP_DIR, or the current directory)"
    parser.add_argument("--dir", type=Path, help=directory)
    parser.add_argument("--quick", action="store_true", help="repeat measurements fewer times")
    verbose = "also print the facts about the machine"
    parser.add_argument("--verbose", action="store_true", help=verbose)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    workers = (
        "number of workers that will run on this machine (default: one per GPU, or one per core)"
    )
    parser.add_argument("-n", "--workers", type=int, help=workers)


def main(options: argparse.Namespace) -> int:
    """Run `samestep doctor` and return its exit status. Raises `ConfigError` for wrong use."""
    if options.workers is not None and options.workers < 1:
        raise ConfigError(f"-n must be at least 1, got {options.workers}")
    system = System()
    gpus = find_gpus(system)
    directory = options.dir or Path(system.environment.get(f"{PREFIX}DIR", ""))
    torch, failure = measure(system.folder(directory).path, quick=options.quick, gpus=bool(gpus))
    workers = options.workers or default_workers(system)
    sections = examine(Case(system, directory.absolute(), workers, torch, failure))
    findings = [finding for section in sections for finding in section.findings]
    healthy = not any(finding.severity == "problem" for finding in findings)
    if options.json:
        report = {"healthy": healthy, "workers": workers, "sections": list(map(asdict, sections))}
        text = json.dumps(report, indent=1)
    else:  # variables may hold any bytes
        text = as_text(sections, verbose=options.verbose).encode(errors="backslashreplace").decode()
        verdict, end, rest = text.partition("\n")
        text = colored(verdict, GREEN if healthy else RED, sys.stdout) + end + rest
    sys.stdout.write(f"{text}\n")
    return 0 if healthy else 1


def default_workers(system: System) -> int:
    """Return one worker per GPU, or one per core."""
    return len(find_gpus(system)) or max(1, int(usable_cores(system) or 1))


def examine(case: Case) -> list[Section]:
    """Return the results of all checks in the order in which they are printed."""
    machine = (examine_software, examine_processors, examine_gpus, examine_memory, examine_limits)
    cluster = (examine_links, examine_launchers, examine_directory)
    return [check(case) for check in (*machine, *cluster, examine_measurements)]


def measure(directory: Path, *, quick: bool, gpus: bool) -> tuple[dict[str, Any], str]:
    """Return the report of the probe process, and the reason if there is none."""
    command = [sys.executable, "-m", "samestep.tools.doctor.probe", str(directory)]
    command += ["--quick"] * quick + ["--gpus"] * gpus
    # another check reports wrong variables
    environment = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment)
        with process:
            try:
                output, errors = process.communicate(timeout=PROBE_SECONDS)
            except BaseException as error:
                _stop(process)  # which stops its workers
                if isinstance(error, subprocess.TimeoutExpired):
                    return {}, f"no result within {PROBE_SECONDS:g} s"
                raise
        # libraries may have printed something before the report
        report: dict[str, Any] = json.loads(output.strip().rpartition("\n")[2])
    except OSError as error:
        return {}, f"a process could not be started ({error})"
    except ValueError:
        last = errors.strip().rpartition("\n")[2]
        status = f"a process that imports torch exited with status {process.returncode}"
        return {}, f"{status}: {last}" if last else status
    return report, ""


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


def examine_measurements(case: Case) -> Section:
    """Report medians with their spread. Slow ones are only notes: this machine may be busy."""
    rows = [row for row in case.torch.get("measured", ()) if row["seconds"]]
    facts = {
        f"{row['name']}, {_decimal_size(row['bytes'])}" if row["bytes"] else row["name"]: {
            "bytes": row["bytes"] or None,
            "times": len(row["seconds"]),
            "median_seconds": statistics.median(row["seconds"]),
            "lowest_seconds": min(row["seconds"]),
            "highest_seconds": max(row["seconds"]),
        }
        for row in rows
    }
    # the largest size of each measurement
    medians: dict[str, tuple[float, int]] = {
        row["name"]: (statistics.median(row["seconds"]), row["bytes"])
        for row in sorted(rows, key=lambda row: row["bytes"])
    }
    return Section("measured", facts, list(_check_measurements(case, medians)))


def _decimal_size(nbytes: int) -> str:
    return f"{nbytes / 1e6:.3g} MB" if nbytes >= MEGABYTE else f"{nbytes / 1e3:.3g} kB"


def _check_measurements(case: Case, medians: Mapping[str, tuple[float, int]]) -> Iterator[Finding]:
    if "workers_error" in case.torch:
        yield problem(
            f"two workers of this host could not start or connect: {case.torch['workers_error']}.",
            "fix the problems above first; then samestep run -n 2 with any script shows more",
        )
    local = "--dir on a local disk, with --remote for a second copy"
    if WRITE in medians:
        seconds, nbytes = medians[WRITE]
        rate = nbytes / seconds
        speed = f"{format_bytes(rate)} per second can be written to {case.directory}"
        if rate < SLOW_WRITE:
            duration = f"a snapshot of 1 GB takes {1e9 / rate:.0f} s, while training continues."
            yield note(f"{speed}: {duration}", local)
        else:
            yield good(speed)
    if SYNC in medians and medians[SYNC][0] > SLOW_SYNC_SECONDS:
        duration = f"{medians[SYNC][0] * 1e3:.0f} ms"
        yield note(f"syncing a small file takes {duration}; a snapshot waits for several.", local)
    if IMPORT in medians and medians[IMPORT][0] > SLOW_IMPORT_SECONDS:
        yield note(
            f"importing torch took {medians[IMPORT][0]:.0f} s, and every start of a run waits for "
            "it: Python's packages are on a slow file system.",
            "a virtual environment or a container image on a local disk",
        )
    if EXCHANGE in medians and ALL_REDUCE in medians:
        (own, nbytes), (gloo, _) = medians[EXCHANGE], medians[ALL_REDUCE]
        ours, theirs = f"{own * 1e3:.1f} ms", f"gloo's all-reduce takes {gloo * 1e3:.1f} ms"
        yield good(f"two workers sum {_decimal_size(nbytes)} of gradients in {ours}; {theirs}")


def as_text(sections: Sequence[Section], *, verbose: bool) -> str:
    """Return the verdict, the findings by urgency, and, if `verbose`, the facts by section."""
    findings = [finding for section in sections for finding in section.findings]
    count = sum(finding.severity == "problem" for finding in findings)
    lines = [f"{some(count, 'problem')} to fix" if count else "no problems", ""]
    for finding in sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)):
        lines.append(f"{finding.severity:7}  {finding.text}")
        lines += [f"{'':7}  do: {finding.fix}"] if finding.fix else []
    return "\n".join([*lines, "", *(_facts(sections) if verbose else ["facts: --verbose"])])


def _facts(sections: Sequence[Section]) -> list[str]:
    lines: list[str] = []
    for section in sections:
        lines.append(section.name)
        width = max(map(len, map(_label, section.facts)), default=0)
        for name, value in section.facts.items():
            first, *rest = _value_lines(name, value)
            lines.append(f"  {_label(name):{width}}  {first}")
            lines += [f"  {'':{width}}  {line}" for line in rest]
        lines.append("")
    return lines[:-1]


def _label(name: str) -> str:
    return name if name.isupper() else name.removesuffix("_bytes").replace("_", " ")


def _value_lines(name: str, value: Any) -> list[str]:
    """Return the lines of a value: one for each of its parts."""
    if isinstance(value, (list, dict)) and not value:
        return ["none"]
    if isinstance(value, dict) and "median_seconds" in value:
        return [_time(value)]
    if isinstance(value, dict):
        return [f"{_label(key)} {_text(key, part)}" for key, part in value.items()]
    if isinstance(value, list) and isinstance(value[0], dict):
        return [
            ", ".join(
                _text(key, part) if key == "name" else f"{_label(key)} {_text(key, part)}"
                for key, part in item.items()
            )
            for item in value
        ]
    return [_text(name, value)]


def _text(name: str, value: Any) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(_text("", part) for part in value) or "none"
    if name.endswith("_bytes") and not isinstance(value, str):
        return format_bytes(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _time(figure: Mapping[str, Any]) -> str:
    """Return a median with its spread, and the rate if there are enough bytes."""
    names = ("median", "lowest", "highest")
    median, low, high = (1e3 * figure[f"{name}_seconds"] for name in names)
    spread = f" ({low:.4g} to {high:.4g}, {figure['times']} times)" if figure["times"] > 1 else ""
    nbytes = figure["bytes"] or 0
    rate = f", {nbytes / median / 1e6:.3g} GB/s" if nbytes > MEGABYTE else ""
    return f"{median:.4g} ms{spread}{rate}"
