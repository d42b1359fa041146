"""The far end of `samestep run --hosts`: starts the command that it is told on standard input, and ends it when that ends.

The first line is a JSON object with `arguments` of samestep, a `directory`, and variables of the
`environment`; every further line is the number of a signal for the command.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from functools import partial
from typing import Any, Final, NoReturn

from samestep.launch.parent import end_with_parent

EXIT_WRONG_USE: Final = 2
LOOK_SECONDS: Final = 0.1
READ_BYTES: Final = 4096


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
            if not selector.select(LOOK_SECONDS):
                continue
            data = os.read(sys.stdin.fileno(), READ_BYTES)
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
