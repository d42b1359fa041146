"""Notices by which a cloud says that it is about to take a host away.

The metadata server of each cloud answers on an address that only the host reaches: `spot/` of
`EC2's instance metadata <https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/
spot-instance-termination-notices.html>`__, `instance/` of `Google Cloud's
<https://cloud.google.com/compute/docs/metadata/predefined-metadata-keys>`__, and `Azure's Scheduled
Events <https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events>`__.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any, Final
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from samestep.host import printable
from samestep.record.sinks import NoRedirects

POLL_SECONDS: Final = 3.0  # the shortest notice is 30 seconds
ANSWER_SECONDS: Final = 1.0  # the server is on the same machine
MAX_BYTES: Final = 1 << 20  # of an answer: events of all hosts of a large scale set
HOST: Final = "169.254.169.254"  # of all three
AWS_TOKEN: Final = "X-aws-ec2-metadata-token"  # noqa: S105  a header
AWS_ACTIONS: Final = ("hibernate", "stop", "terminate")
AZURE_ENDS: Final = ("Preempt", "Terminate")  # not Freeze, Reboot and Redeploy
AZURE_EVENTS: Final = "/metadata/scheduledevents?api-version=2020-07-01"
AZURE_NAME: Final = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"

# a path, headers and a method, to the text of the answer; None for 404, which means "nothing"
Ask = Callable[[str, Mapping[str, str], str], str | None]


@dataclass(frozen=True)
class Notice:
    """What a cloud says about this host; only one that `is_certain` stops its workers."""

    text: str
    is_certain: bool = True


def ask_aws(ask: Ask) -> Notice | None:
    """Ask for an interruption, and for a rebalance recommendation, which may come to nothing."""
    token = ask("/latest/api/token", {f"{AWS_TOKEN}-ttl-seconds": "60"}, "PUT")
    if token is None:  # it is the server of another cloud, which has no instance action either
        raise ValueError("expected a token of IMDSv2, got none")
    headers = {AWS_TOKEN: token.strip()}
    if (text := ask("/latest/meta-data/spot/instance-action", headers, "GET")) is not None:
        answer = _object(text)
        if (action := answer.get("action")) not in AWS_ACTIONS:
            raise ValueError(f"expected an instance action, got {text!r:.200}")
        return Notice(f"will {action} this instance at {answer.get('time')!s:.40}")
    path = "/latest/meta-data/events/recommendations/rebalance"
    if (text := ask(path, headers, "GET")) is not None:
        time = f"{_object(text).get('noticeTime')!s:.40}"
        return Notice(f"may interrupt this instance (rebalance recommendation of {time})", False)
    return None


def ask_gcp(ask: Ask) -> Notice | None:
    """Ask whether this VM is preempted, or will be terminated for maintenance of its host."""
    headers = {"Metadata-Flavor": "Google"}
    preempted = (ask("/computeMetadata/v1/instance/preempted", headers, "GET") or "").strip()
    if preempted not in {"TRUE", "FALSE"}:
        raise ValueError(f"expected TRUE or FALSE, got {preempted!r:.80}")
    if preempted == "TRUE":
        return Notice("preempts this VM")
    event = ask("/computeMetadata/v1/instance/maintenance-event", headers, "GET") or ""
    if event.startswith("TERMINATE"):  # a live migration stops nothing
        return Notice(f"will terminate this VM ({event.strip():.80})")
    return None


def ask_azure(ask: Ask) -> Notice | None:
    """Ask for an event that ends this VM; events of other VMs of its set do not count."""
    headers = {"Metadata": "true"}
    text = ask(AZURE_EVENTS, headers, "GET") or ""
    events = _object(text).get("Events")
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise ValueError(f"expected a list of events, got {text!r:.200}")
    ends = [event for event in events if event.get("EventType") in AZURE_ENDS]
    if not ends:
        return None
    if not (name := (ask(AZURE_NAME, headers, "GET") or "").strip()):
        raise ValueError("expected the name of this VM, got none")
    for event in ends:
        resources = event.get("Resources")
        if isinstance(resources, list) and name in resources:
            when = event.get("NotBefore") or "once"  # it is empty when the event has begun
            return Notice(f"will {event['EventType'].lower()} this VM at {when!s:.40}")
    return None


def _object(text: str) -> dict[str, Any]:
    answer = json.loads(text)
    if not isinstance(answer, dict):
        raise ValueError(f"expected a JSON object, got {text!r:.200}")  # noqa: TRY004  of the server
    return answer


@dataclass(frozen=True)
class Cloud:
    """How to ask a cloud; `variable` is the one by which its own tools find another server."""

    title: str
    ask: Callable[[Ask], Notice | None]
    variable: str


CLOUDS: Final = {
    "aws": Cloud("AWS", ask_aws, "AWS_EC2_METADATA_SERVICE_ENDPOINT"),
    "gcp": Cloud("Google Cloud", ask_gcp, "GCE_METADATA_HOST"),
    "azure": Cloud("Azure", ask_azure, "AZURE_POD_IDENTITY_AUTHORITY_HOST"),
}


def server_of(cloud: Cloud, environment: Mapping[str, str]) -> str:
    """Return the URL of a cloud's metadata server, without a slash at its end."""
    server = environment.get(cloud.variable) or HOST
    return (server if "://" in server else f"http://{server}").rstrip("/")


def asking(server: str) -> Ask:
    """Return what asks a server. It raises `OSError` or `HTTPException` without an answer."""
    opener = build_opener(ProxyHandler({}), NoRedirects)  # a proxy has metadata of its own

    def ask(path: str, headers: Mapping[str, str], method: str) -> str | None:
        request = Request(server + path, headers=dict(headers), method=method)  # noqa: S310
        try:
            with opener.open(request, timeout=ANSWER_SECONDS) as answer:
                return str(answer.read(MAX_BYTES), errors="replace")
        except HTTPError as error:
            with error:
                if error.code == 404:
                    return None
            raise

    return ask


@contextmanager
def watching(
    name: str | None, tell: Callable[[str], object], stop: Callable[[], object]
) -> Iterator[None]:
    """Ask the cloud called `name` for notices, from a thread, until the end of the block.

    `tell` gets each new notice, and the first failure, as a line; `stop` is called once, for the
    first notice that is certain. One that is withdrawn afterwards does not start workers again.
    """
    if name is None:
        yield
        return
    cloud, ended = CLOUDS[name], threading.Event()
    server = server_of(cloud, os.environ)
    ask = asking(server)

    def watch() -> None:
        told, has_failed = "", False
        while not ended.is_set():
            try:
                notice = cloud.ask(ask)
            except (OSError, HTTPException, ValueError, RecursionError) as error:
                if not has_failed:
                    has_failed = True
                    tell(
                        f"{cloud.title} at {server} does not say whether it takes this host away "
                        f"({printable(str(error))}), and is asked again every {POLL_SECONDS:g} s; "
                        f"on a host of another cloud, leave out preemption={name}"
                    )
            else:
                if notice is not None and notice.text != told:
                    told = notice.text
                    tell(f"{cloud.title} {printable(told)}")
                if notice is not None and notice.is_certain:
                    stop()
                    return
            ended.wait(POLL_SECONDS)

    thread = threading.Thread(target=watch, name="samestep preemption", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
