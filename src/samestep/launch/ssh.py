"""The far end of `samestep run --hosts`: starts the command that it is told on standard input, and ends it when that ends.

The first line is a JSON object with `arguments` of samestep, a `directory`, and variables of the
`environment`; every further line is the number of a signal for the command.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import secrets
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from subprocess import PIPE
from typing import IO, Any, Final, NoReturn, TextIO

from typing_extensions import Self

from samestep.cluster.launchers import PORTS
from samestep.comm.link import write_address
from samestep.config import PREFIX, TOKEN, Config, merge
from samestep.errors import ConfigError, LaunchError
from samestep.host import end_with_parent
from samestep.launch.cluster_spec import Nodes, read_token
from samestep.launch.signals import StopSignals

EXIT_WRONG_USE: Final = 2
REMOTE_POLL_SECONDS: Final = 0.1
REMOTE_READ_BYTES: Final = 4096


def main() -> NoReturn:
    """Run the command; exit with its status, as a shell tells it."""
    # without a buffer, so that nothing is taken of what follows
    order = json.loads(sys.stdin.buffer.raw.readline())  # type: ignore[union-attr]
    try:
        os.chdir(order["directory"])
    except OSError as error:
        where = f"host {socket.gethostname()} cannot work in the folder in which --hosts was given"
        sys.stderr.write(
            f"samestep: error: {where}: {error}; expected the same folders on all hosts, as on a shared disk\n"
        )
        sys.exit(EXIT_WRONG_USE)
    sys.exit(_run(order))


def _run(order: dict[str, Any]) -> int:
    command = subprocess.Popen(
        [sys.executable, "-m", "samestep", *order["arguments"]],
        env={**os.environ, **order["environment"]},
        stdin=subprocess.DEVNULL,
        # there are no threads here
        preexec_fn=partial(end_with_parent, os.getpid(), signal.SIGTERM),  # noqa: PLW1509
    )
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin, selectors.EVENT_READ)
        while command.poll() is None:
            if not selector.select(REMOTE_POLL_SECONDS):
                continue
            data = os.read(sys.stdin.fileno(), REMOTE_READ_BYTES)
            for number in data.split():
                command.send_signal(int(number))
            if not data:  # whoever started this is gone
                command.terminate()
                selector.unregister(sys.stdin)
                return _status(command.wait())
    return _status(command.returncode)


def _status(code: int) -> int:
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    main()


REMOTE_SHELL: Final = "ssh"
LINE: Final = re.compile(
    r"(?P<name>[A-Za-z0-9_](?:[A-Za-z0-9_.:%@-]*[A-Za-z0-9])?)(?:\s+workers=(?P<workers>[1-9][0-9]{0,4}))?"
)
MOST_BYTES: Final = 1 << 20
PASSED_ON: Final = ("PYTHONPATH",)
LOOK_SECONDS: Final = 0.2
READ_BYTES: Final = 1 << 16  # at once, and of an unfinished line
FAREWELL_SECONDS: Final = 5.0  # after one host failed, for the others to end by themselves


@dataclass(frozen=True)
class Host:
    """A line of a hosts file: a host as the remote shell takes it, and its workers if the line says so."""

    name: str
    workers: int | None

    @property
    def address(self) -> str:
        """The host without a user."""
        return self.name.rpartition("@")[2]


def read_hosts(path: Path) -> list[Host]:
    """Read a hosts file. Raises `ConfigError` where it cannot be used."""
    try:
        with path.open("rb") as file:
            text = file.read(MOST_BYTES + 1).decode()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--hosts {path} was given, and cannot be read: {error}") from error
    if len(text) > MOST_BYTES:
        raise ConfigError(
            f"--hosts {path} was given, and has more than {MOST_BYTES} bytes; expected a line a host"
        )
    return parse_hosts(text, f"--hosts {path}")


def parse_hosts(text: str, name: str) -> list[Host]:
    """Read a line a host, `HOST [workers=N]`; # begins a comment. Raises `ConfigError` that calls the text `name`, and tells the line."""
    lines: dict[str, int] = {}
    hosts = []
    for number, line in enumerate(text.split("\n"), start=1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        where = f"{name}, line {number}: {content[:100]!r} was given"
        found = LINE.fullmatch(content)
        if not found:
            raise ConfigError(f"{where}; expected HOST or HOST workers=N, as in: node1 workers=4")
        host = Host(found["name"], int(found["workers"]) if found["workers"] else None)
        if host.address in lines:
            raise ConfigError(
                f"{where}, and line {lines[host.address]} has the same host; expected each host once"
            )
        lines[host.address] = number
        hosts.append(host)
    if not hosts:
        raise ConfigError(
            f"{name} was given, and names no host; expected a line a host, as in: node1 workers=4"
        )
    return hosts


def run_on_hosts(
    arguments: argparse.Namespace,
    options: Mapping[str, Any],
    environment: Mapping[str, str] = os.environ,
) -> int:
    """Run `samestep run` on every host of a file until all have ended; return the status of the first host that failed, or 0.

    `options` are those of the run that were given. Raises `ConfigError` for flags or a file that
    cannot be used, `LaunchError` when the remote shell cannot be started.
    """
    hosts = read_hosts(Path(arguments.hosts))
    nodes = Nodes.read(arguments.nodes or str(len(hosts)))
    if nodes.most > len(hosts):
        raise ConfigError(
            f"--nodes {arguments.nodes} was given, and {arguments.hosts} has {len(hosts)} hosts; expected no more than those"
        )
    timeout = merge(options, environment).grace_period + FAREWELL_SECONDS
    master = arguments.master or write_address(hosts[0].address, secrets.choice(PORTS))
    common = [
        "--nodes",
        str(nodes),
        "--master",
        master,
        f"--mode={arguments.mode}",
        *_flags(arguments),
    ]
    script = [*(["-m"] if arguments.module else []), arguments.script, *arguments.arguments]
    passed_on = {
        name: text
        for name, text in environment.items()
        if name in PASSED_ON or name.startswith(PREFIX)
    }
    passed_on[TOKEN] = read_token(arguments, environment) or secrets.token_hex()
    signals = StopSignals()
    with ExitStack() as exits:
        exits.enter_context(signals.noted())
        shells = []
        for host in hosts:
            command = ["run", *common, f"--workers={host.workers or arguments.workers}", *script]
            order = {"arguments": command, "directory": str(Path.cwd()), "environment": passed_on}
            shells.append(
                exits.enter_context(Shell(host, shlex.split(arguments.ssh or REMOTE_SHELL), order))
            )
        Watcher(shells, signals, timeout, may_fail=len(hosts) - nodes.least).see_to_end()
    if signals.received:
        signal.raise_signal(signals.received[0])
    statuses = [shell.status or 0 for shell in shells]  # all have ended
    return statuses[0] if nodes.least < nodes.most else next(filter(None, statuses), 0)


class Shell:
    """`samestep run` on a host, at the other end of a remote shell; a context manager that leaves no process here, nor there.

    What it is to do goes over its standard input, where nobody else can read the token. When that
    ends, so does the run there.
    """

    def __init__(self, host: Host, shell: Sequence[str], order: Mapping[str, object]) -> None:
        self.host = host
        command = [
            *shell,
            host.name,
            f"exec {shlex.quote(sys.executable)} -m samestep.launch.ssh",
        ]
        try:
            # In a session of its own: Ctrl-C is for this process, which passes it on once.
            self._process = subprocess.Popen(
                command, stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True
            )
        except OSError as error:
            raise LaunchError(
                f"the remote shell {shell[0]!r} cannot be started: {error}; give another one by --ssh"
            ) from error
        assert self._process.stdin  # noqa: S101  it is a pipe
        self._input = self._process.stdin
        self.tell(order)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self.let_go()
        for pipe in self.outputs:
            pipe.close()

    @property
    def outputs(self) -> list[IO[bytes]]:
        """What the host prints, to stdout and to stderr."""
        return [pipe for pipe in (self._process.stdout, self._process.stderr) if pipe]

    @property
    def status(self) -> int | None:
        """The exit status as a shell tells it, None while it runs."""
        status = self._process.poll()
        return status if status is None or status >= 0 else 128 - status

    def tell(self, order: object) -> None:
        """Send a line to the other end, which may be gone."""
        with suppress(OSError, ValueError):
            self._input.write(json.dumps(order).encode() + b"\n")
            self._input.flush()

    def let_go(self) -> None:
        """End the standard input, and with it the run on the host."""
        with suppress(OSError):  # of what could not be sent
            self._input.close()


class Watcher:
    """Passes on what hosts print, and signals to them; where more fail than `may_fail`, or the first host ends, all are ended."""

    def __init__(
        self, shells: Sequence[Shell], signals: StopSignals, timeout: float, *, may_fail: int
    ) -> None:
        self._shells, self._signals, self._timeout, self._may_fail = (
            shells,
            signals,
            timeout,
            may_fail,
        )
        self._signals_told = 0
        self._let_go_at = self._give_up_at = math.inf
        self._unfinished: dict[IO[bytes], bytes] = {}

    def see_to_end(self) -> None:
        """Return when all have ended, or are not to be waited for any longer."""
        with selectors.DefaultSelector() as selector:
            for shell in self._shells:
                for pipe, screen in zip(shell.outputs, (sys.stdout, sys.stderr), strict=True):
                    selector.register(pipe, selectors.EVENT_READ, screen)
            while True:
                events = selector.select(LOOK_SECONDS)
                for key, _ in events:
                    if not self._pass_on(key.fileobj, key.data):
                        selector.unregister(key.fileobj)
                self._pass_on_signals()
                all_ended = all(shell.status is not None for shell in self._shells)
                if (all_ended and not events) or self._end_in_time(time.monotonic()):
                    # without an end of their output, which what a shell leaves in the background
                    # may hold open
                    return

    def _pass_on(self, pipe: Any, screen: TextIO) -> bool:
        """Print what came, in whole lines; return False at its end."""
        data = os.read(pipe.fileno(), READ_BYTES)
        lines, newline, rest = (self._unfinished.pop(pipe, b"") + data).rpartition(b"\n")
        if data and len(rest) < READ_BYTES:
            self._unfinished[pipe] = rest
        elif rest:
            newline += rest + b"\n"
        if newline:
            screen.write((lines + newline).decode(errors="backslashreplace"))
            screen.flush()
        return bool(data)

    def _pass_on_signals(self) -> None:
        for number in self._signals.received[self._signals_told :]:
            for shell in self._shells:
                shell.tell(number)
        self._signals_told = len(self._signals.received)

    def _end_in_time(self, now: float) -> bool:
        """Return True when those that still run are not to be waited for."""
        failed = sum(shell.status not in {None, 0} for shell in self._shells)
        if self._let_go_at == math.inf and (
            failed > self._may_fail or self._shells[0].status is not None or self._signals.received
        ):
            # By themselves they end first, and tell why.
            self._let_go_at, self._give_up_at = (
                now + FAREWELL_SECONDS,
                now + FAREWELL_SECONDS + self._timeout,
            )
            if self._signals.received:
                self._let_go_at = self._give_up_at
        if now >= self._let_go_at:
            for shell in self._shells:
                shell.let_go()
        return now >= self._give_up_at


def _flags(arguments: argparse.Namespace) -> list[str]:
    given = {option.name: getattr(arguments, option.name) for option in fields(Config)}
    return [
        f"--{name.replace('_', '-')}={text}" for name, text in given.items() if text is not None
    ]
