"""Secrets of a run's options, settings and command are in no file and on no page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from samestep.record import open_record
from samestep.record.cursor import Cursor
from samestep.record.exporter import Exporter, ExporterProcess
from samestep.record.sinks import SinkSpec
from samestep.snapshot.hooks import Mirror
from samestep.snapshot.remote import RemoteDirectory
from samestep.storage import Retries, Storage, StorageError
from samestep.watch.runs import open_views
from tests.python import run_python
from tests.snapshot.faulty import failing, faulty_storage
from tests.watch.serving import until
from tests.watch.writing import started, write

HIDDEN = "hunter2-secret"
QUERY = f"?X-Amz-Date=1&X-Amz-Signature={HIDDEN}"
SCRIPT = f"""
import sys, torch, samestep as ss
settings = {{"lr": 0.1, "max_tokens": "many", "api_key": "{HIDDEN}", "data": {{"url": "https://u:{HIDDEN}@h/x"}}}}
with ss.init(lanes=1, settings=settings) as run:
    model = torch.nn.Linear(1, 1)
    run.track(model=model)
    if sys.argv[-1] == "fail":
        raise ValueError("no answer from https://u:{HIDDEN}@h/x")
"""


def contents(folder: Path) -> str:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return "".join(path.read_bytes().decode(errors="replace") for path in files)


def test_a_run_and_its_resume_write_no_secret(tmp_path):
    script, run, sent = tmp_path / "train.py", tmp_path / "run", tmp_path / "sent"
    script.write_text(SCRIPT)
    flags = ["--dir", run, "--sinks", f"file://{sent}?token={HIDDEN}"]
    command = ["-m", "samestep", "run", *flags, script, f"--password={HIDDEN}"]
    words = [*map(str, command), f"db={{pwd: {HIDDEN}}}", f"dsn=Server=h;Password={HIDDEN}"]
    words += ["-p", HIDDEN, "--token", HIDDEN]
    run_python(*words, check=True)
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert events[0]["settings"] == {
        "lr": 0.1,
        "max_tokens": "many",
        "api_key": "***",
        "data": {"url": "https://***@h/x"},
    }
    assert events[0]["command"].endswith(
        "'--password=***' 'db={pwd: ***}' 'dsn=Server=h;Password=***' -p '***' --token '***'"
    )
    assert events[0]["config"]["sinks"] == [f"file://{sent}?token=***"]
    resumed = run_python(*words, "fail")
    assert resumed.returncode == 1
    (run / "logs" / "worker-0.log").unlink()  # what the script prints is its own
    assert HIDDEN not in contents(run)
    assert "no answer from https://***@h/x" in contents(run)


def test_the_names_of_sinks_have_no_secrets_but_their_storage_does(tmp_path, monkeypatch):
    signed, written, addresses = f"file://{tmp_path}/sent{QUERY}", tmp_path / "status", []
    monkeypatch.setattr(Storage, "sizes", lambda self, _: addresses.append(self._address) or {})
    monkeypatch.setattr(Storage, "write", lambda *_: None)
    write(tmp_path, started())
    (tmp_path / "record").mkdir()
    with written.open("w") as channel:
        assert Exporter(tmp_path, [SinkSpec("sinks", signed)], channel).finish(60)
    assert set(addresses) == {signed}
    assert json.loads(written.read_text())["name"] == signed.replace(HIDDEN, "***")
    assert Cursor(tmp_path).get(signed.replace(HIDDEN, "***")) == 0
    assert HIDDEN not in contents(tmp_path)


def test_no_argument_of_the_exporter_is_a_secret(tmp_path):
    record = open_record(tmp_path, writes=True)
    record.event("started", step=0)
    sink = SinkSpec("sinks", f"file://{tmp_path}/sent{QUERY}")
    exporter = ExporterProcess(tmp_path, [sink], record)
    try:
        pid = until(lambda: exporter.pid)
        until(lambda: b"exporter" in Path(f"/proc/{pid}/cmdline").read_bytes())
        assert HIDDEN.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    finally:
        exporter.finish()
        record.close()


def test_messages_of_a_storage_have_no_secrets(tmp_path):
    with faulty_storage() as files:
        files.before = failing(99, OSError(f"refused: https://h/?sig={HIDDEN}"))
        url = f"faulty://far/run?sig={HIDDEN}"
        with pytest.raises(StorageError, match=r"run\?sig=\*\*\*.*h/\?sig=\*\*\*") as caught:
            Storage(url, Retries(tries=1)).names()
        assert HIDDEN not in str(caught.value)
        reports = []
        remote = RemoteDirectory(url, Retries(tries=1))
        mirror = Mirror(
            remote,
            tmp_path,
            keep_last=1,
            keep_best=0,
            report=lambda *a, **f: reports.append((a, f)),
        )
        until(lambda: reports)
        mirror.close()
        assert HIDDEN not in str(reports)


def test_the_page_shows_no_secret_of_a_url(tmp_path):
    run = tmp_path / f"run?token={HIDDEN}"
    write(run, started())
    views = open_views(f"file://{run}")
    for view in views.values():
        assert HIDDEN not in json.dumps([view.row(), view.id, view.name, view.source.location])
