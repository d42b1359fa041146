"""Run `samestep run` on the hosts of a hosts file, through a remote shell.

`python -m samestep.launch.ssh` is the remote side. It reads a command from standard input and runs
it until standard input ends. The first line is a JSON object with the `arguments` of samestep, a
`directory`, and variables of the `environment`. Each further line is the number of a signal for the
command.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import secrets
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from subprocess import PIPE
from typing import IO, Any, Final, NoReturn, TextIO

from samestep.cluster.launchers import PORTS
from samestep.comm.link import write_address
from samestep.config import PREFIX, TOKEN, Config, flag_name, merge
from samestep.errors import ConfigError, LaunchError
from samestep.host import SIGNALED, end_with_parent
from samestep.launch.cluster_spec import Host, Nodes, read_hosts, read_token
from samestep.launch.worker import StopSignals

POLL_SECONDS: Final = 0.1
READ_BYTES: Final = 1 << 16  # per read, and of an unfinished line
EXIT_SECONDS: Final = 5.0  # after a failure, for the other hosts to report it and exit
EXIT_WRONG_USE: Final = 2


def run_on_hosts(
    arguments: argparse.Namespace,
    options: Mapping[str, Any],
    environment: Mapping[str, str] = os.environ,
) -> int:
    """Run `samestep run` on every host of a hosts file, and wait for all of them.

    `options` are the given options of the run. Returns 0, or the status of the first host that
    failed; if hosts may leave, the status of the first host. Raises `ConfigError` for invalid flags
    or an invalid file, and `LaunchError` if the remote shell cannot be started.
    """
    hosts = read_hosts(Path(arguments.hosts))
    nodes = Nodes.read(arguments.nodes or str(len(hosts)))
    if nodes.max_nodes > len(hosts):
        raise ConfigError(
            f"--nodes must be at most the number of hosts in {arguments.hosts} ({len(hosts)}), "
            f"got {arguments.nodes}"
        )
    timeout = merge(options, environment, is_complete=False).grace_period + EXIT_SECONDS
    master = arguments.master or write_address(hosts[0].address, secrets.choice(PORTS))
    common = ["--nodes", str(nodes), "--master", master, f"--mode={arguments.mode}"]
    texts = {option.name: getattr(arguments, option.name) for option in fields(Config)}
    common += [f"{flag_name(name)}={text}" for name, text in texts.items() if text is not None]
    common += [] if arguments.gpus is None else [f"--gpus={arguments.gpus}"]
    script = [*(["-m"] if arguments.module else []), arguments.script, *arguments.arguments]
    names = [name for name in environment if name == "PYTHONPATH" or name.startswith(PREFIX)]
    variables = {name: environment[name] for name in names}
    variables[TOKEN] = read_token(arguments, environment) or secrets.token_hex()
    signals = StopSignals()
    shell = shlex.split(arguments.ssh or "ssh")
    with ExitStack() as exits:
        exits.enter_context(signals.recorded())
        shells = []
        for host in hosts:
            workers = host.workers or arguments.workers
            count = [] if workers is None else [f"--workers={workers}"]
            command = ["run", *common, *count, *script]
            job = {"arguments": command, "directory": str(Path.cwd()), "environment": variables}
            shells.append(exits.enter_context(closing(Shell(host, shell, job))))
        ShellMonitor(shells, signals, timeout, may_fail=len(hosts) - nodes.min_nodes).run()
    if signals.received:
        signal.raise_signal(signals.received[0])
    statuses = [shell.status or 0 for shell in shells]
    is_elastic = nodes.min_nodes < nodes.max_nodes
    return statuses[0] if is_elastic else next(filter(None, statuses), 0)


class Shell:
    """`samestep run` on a host, through a remote shell.

    Attributes: `outputs` (list[IO[bytes]]): the host's stdout and stderr.

    The job is sent to standard input, where no other user can read the token. The run on the host
    ends when its standard input ends, so no process is left behind on either side.
    """

    def __init__(self, host: Host, shell: Sequence[str], job: Mapping[str, object]) -> None:
        remote = f"exec {shlex.quote(sys.executable)} -m samestep.launch.ssh"
        command = [*shell, host.name, remote]
        try:
            # a new session: Ctrl-C is for this process, which forwards it once
            self._process = subprocess.Popen(
                command, stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True
            )
        except OSError as error:
            raise LaunchError(
                f"cannot start the remote shell {shell[0]!r}: {error}; choose another with --ssh"
            ) from error
        assert self._process.stdin  # noqa: S101  it is a pipe
        self._input = self._process.stdin
        outputs = self._process.stdout, self._process.stderr
        self.outputs: list[IO[bytes]] = [pipe for pipe in outputs if pipe]
        self.send(job)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self.close_input()
        for pipe in self.outputs:
            pipe.close()

    @property
    def status(self) -> int | None:
        """The exit status as in a shell, None while it runs."""
        status = self._process.poll()
        return None if status is None else _shell_status(status)

    def send(self, message: object) -> None:
        """Send a line to the remote side, which may have exited."""
        with suppress(OSError, ValueError):
            self._input.write(json.dumps(message).encode() + b"\n")
            self._input.flush()

    def close_input(self) -> None:
        """Close standard input, which ends the run on the host."""
        with suppress(OSError):  # unsent data is lost
            self._input.close()


class ShellMonitor:
    """Prints the output of hosts, forwards signals to them, and ends all of them on failure.

    The run fails if the first host exits, or more than `may_fail` hosts fail.
    """

    def __init__(
        self, shells: Sequence[Shell], signals: StopSignals, timeout: float, *, may_fail: int
    ) -> None:
        self._shells, self._signals = shells, signals
        self._timeout, self._may_fail = timeout, may_fail
        self._signals_sent = 0
        self._end_at = self._give_up_at = math.inf
        self._unfinished: dict[IO[bytes], bytes] = {}

    def run(self) -> None:
        """Return when all hosts have exited or the timeout has passed."""
        with selectors.DefaultSelector() as selector:
            for shell in self._shells:
                for pipe, stream in zip(shell.outputs, (sys.stdout, sys.stderr), strict=True):
                    selector.register(pipe, selectors.EVENT_READ, stream)
            while True:
                events = selector.select(POLL_SECONDS)
                for key, _ in events:
                    if not self._forward(key.fileobj, key.data):
                        selector.unregister(key.fileobj)
                for number in self._signals.received[self._signals_sent :]:
                    self._signals_sent += 1
                    for shell in self._shells:
                        shell.send(number)
                all_exited = all(shell.status is not None for shell in self._shells)
                # a shell's background processes may hold its output open
                if (all_exited and not events) or self._is_timed_out(time.monotonic()):
                    return

    def _forward(self, pipe: Any, stream: TextIO) -> bool:
        """Print complete lines; return False at the end of the output."""
        data = os.read(pipe.fileno(), READ_BYTES)
        lines, newline, rest = (self._unfinished.pop(pipe, b"") + data).rpartition(b"\n")
        if data and len(rest) < READ_BYTES:
            self._unfinished[pipe] = rest
        elif rest:
            newline += rest + b"\n"
        if newline:
            stream.write((lines + newline).decode(errors="backslashreplace"))
            stream.flush()
        return bool(data)

    def _is_timed_out(self, now: float) -> bool:
        """End the remaining hosts when it is time; return whether to stop waiting for them."""
        failed = sum(shell.status not in {None, 0} for shell in self._shells)
        first_exited = self._shells[0].status is not None
        is_ending = failed > self._may_fail or first_exited or self._signals.received
        if self._end_at == math.inf and is_ending:
            # until then, hosts can report the reason and exit
            self._end_at = now + EXIT_SECONDS
            self._give_up_at = self._end_at + self._timeout
            if self._signals.received:
                self._end_at = self._give_up_at
        if now >= self._end_at:
            for shell in self._shells:
                shell.close_input()
        return now >= self._give_up_at


def main() -> NoReturn:
    """Run the command on the remote side; exit with its status, as in a shell."""
    # unbuffered, so that the lines after the first are left for `os.read`
    job = json.loads(sys.stdin.buffer.raw.readline())  # type: ignore[union-attr]
    try:
        os.chdir(job["directory"])
    except OSError as error:
        sys.stderr.write(
            f"samestep: error: host {socket.gethostname()} cannot use the directory from which "
            f"--hosts started: {error}; all hosts need the same directories, as on a shared disk\n"
        )
        sys.exit(EXIT_WRONG_USE)
    command = subprocess.Popen(
        [sys.executable, "-m", "samestep", *job["arguments"]],
        env={**os.environ, **job["environment"]},
        stdin=subprocess.DEVNULL,
        # there are no threads here
        preexec_fn=partial(end_with_parent, os.getpid(), signal.SIGTERM),  # noqa: PLW1509
    )
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin, selectors.EVENT_READ)
        while command.poll() is None:
            if selector.select(POLL_SECONDS):
                data = os.read(sys.stdin.fileno(), READ_BYTES)
                for number in data.split():
                    command.send_signal(int(number))
                if not data:  # the starting process is gone
                    command.terminate()
                    break
    sys.exit(_shell_status(command.wait()))


def _shell_status(code: int) -> int:
    return code if code >= 0 else SIGNALED - code


if __name__ == "__main__":
    main()
