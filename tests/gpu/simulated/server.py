"""A process with simulated devices, which runs functions of tests in forks of itself.

`python -m tests.gpu.simulated.server FILE`, where FILE is the number of an open socket.
"""

from __future__ import annotations

from tests.gpu.simulated import device  # before torch is used

# isort: split
import gc
import os
import pickle
import sys
import traceback
from importlib import import_module
from multiprocessing.connection import Connection
from tempfile import TemporaryFile

import torch
import torch._dynamo  # imported by the first step of an optimizer: once here, not in every worker

from tests.gpu.simulated import graphs, nccl


def serve(connection: Connection) -> None:
    """Answer requests until the other end is closed."""
    device.install()
    nccl.install()
    graphs.install()
    import samestep.launch.supervisor  # after the devices are there
    import samestep.run  # noqa: F401

    torch.set_num_threads(1)
    while True:
        try:
            modules, request = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        for name in modules:  # once here, not in every fork
            import_module(name)
        gc.freeze()  # forks collect only what is new to them
        with TemporaryFile() as answer, TemporaryFile() as printed:
            if (pid := os.fork()) == 0:
                try:
                    _answer(request, answer, printed)
                finally:
                    os._exit(0)
            os.waitpid(pid, 0)
            for file in (answer, printed):
                file.seek(0)
                connection.send_bytes(file.read())


def _answer(request: bytes, answer, printed) -> None:
    connection_to_nobody = os.open(os.devnull, os.O_RDONLY)
    os.dup2(connection_to_nobody, 0)
    for number in (1, 2):
        os.dup2(printed.fileno(), number)
    torch.set_num_threads(1)  # before threads of autograd make the pool that a fork has to renew
    try:
        body, args, options, environment = pickle.loads(request)
        os.environ.update(environment)
        result = pickle.dumps((True, body(*args, **options)))
    except BaseException:  # noqa: BLE001  the test shows it
        result = pickle.dumps((False, traceback.format_exc()))
    sys.stdout.flush()
    sys.stderr.flush()
    answer.write(result)
    answer.flush()


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
