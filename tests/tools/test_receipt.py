"""`samestep receipt`: what was changed after a run is found, by a check or only by a repetition."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import samestep as ss
from samestep.cli import main
from samestep.errors import RecordError
from samestep.record.chain import FILE, Chain, ChainFile, link, origin
from samestep.tools import receipt as receipts
from samestep.tools.receipt import Verdicts, anchor_of, check, make, read
from tests.python import run_python
from tests.tools import spike

HEADER, ROW = 64, 64
SCRIPT = Path(spike.__file__)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of 10 steps with snapshots and an order of its own, and its receipt."""
    folder = tmp_path_factory.mktemp("trained")
    options = {"snapshot_every": 4, "keep_last": 9, "system_every": None}
    with ss.init(lanes=2, dir=folder / "run", **options) as run:
        model = run.replicate(nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        run.track(model=model, optimizer=optimizer, schedule=schedule)
        points = torch.arange(12.0)[:, None]
        for batch in run.batches(points, 4, epochs=5, order=[3, 1, 4, 1, 5, 9, 2, 6]):
            means = run.backward(lambda model, rows: model(rows).square().mean(), model, batch)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            run.log(means)
    assert main(["receipt", "make", str(folder / "run"), "--out", str(folder / "receipt")]) == 0
    return folder


# Each changes a copy of the folder `at`, with numbers from `draw`.


def flip(path, draw, start=0, stop=None):
    content = bytearray(path.read_bytes())
    place = draw.randrange(start, stop or len(content))
    content[place] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def rows_of(at):
    content = (at / "run" / FILE).read_bytes()
    rows = [content[n : n + ROW] for n in range(HEADER, len(content), ROW)]
    return content[:HEADER], rows


def relinked(at, first, parts):
    """Write the chain again from a step on, in which other digests are."""
    with_head = Chain.open(at / "run")
    head, seed = with_head.head_after(first), with_head.seed
    with_head.close()
    header, rows = rows_of(at)
    for step in range(first, len(rows)):
        own = parts if step == first else [rows[step][n : n + 8] for n in range(32, 64, 8)]
        head = link(head, step, seed, tuple(own))
        rows[step] = head + b"".join(own)
    (at / "run" / FILE).write_bytes(header + b"".join(rows))


def chain_byte(at, draw):
    flip(at / "run" / FILE, draw)


def chain_part(at, draw):
    place = HEADER + draw.randrange(10) * ROW + 32 + 8 * draw.randrange(4)
    flip(at / "run" / FILE, draw, place, place + 8)


def chain_exchanged(at, draw):
    header, rows = rows_of(at)
    one, other = draw.sample(range(len(rows)), 2)
    rows[one], rows[other] = rows[other], rows[one]
    (at / "run" / FILE).write_bytes(header + b"".join(rows))


def chain_cut(at, draw):
    path = at / "run" / FILE
    path.write_bytes(path.read_bytes()[: -draw.choice([1, 63, 64, 65, 128, 640])])


def chain_relinked(at, draw):
    relinked(at, draw.randrange(10), [draw.randbytes(8) for _ in range(4)])


def chain_removed(at, draw):
    (at / "run" / FILE).unlink()


def lines_of(at):
    path = at / "run/events.jsonl"
    return path, path.read_bytes().splitlines(keepends=True)


def edit(at, draw, kind, change):
    """Change an event of a kind in the record."""
    path, lines = lines_of(at)
    place = draw.choice([n for n, line in enumerate(lines) if f'"event":"{kind}"'.encode() in line])
    event = json.loads(lines[place])
    change(event)
    lines[place] = json.dumps(event, separators=(",", ":")).encode() + b"\n"
    path.write_bytes(b"".join(lines))


def record_loss(at, draw):
    edit(at, draw, "scalars", lambda event: event["values"].update(loss=draw.random()))


def record_rate(at, draw):
    edit(at, draw, "timing", lambda event: event.update(rates={"optimizer": draw.random()}))


def record_option(at, draw):
    edit(at, draw, "started", lambda event: event["config"].update(seed=draw.randrange(99) + 1))


def record_code(at, draw):
    edit(at, draw, "started", lambda event: event["environment"].update({"file a": "b"}))


def record_length(at, draw):
    edit(at, draw, "loop", lambda event: event.update(samples=draw.randrange(99) + 9))


def record_plan(at, draw):
    edit(at, draw, "loop", lambda event: event["plan"].update(seed=draw.randrange(99)))


def record_order(at, draw):
    edit(at, draw, "order", lambda event: event.update(digest=draw.randbytes(8).hex()))


def record_state(at, draw):
    edit(at, draw, "state", lambda event: event.update(digest=draw.randbytes(32).hex()))


def record_removed(at, draw):
    path, lines = lines_of(at)
    del lines[draw.randrange(len(lines))]
    path.write_bytes(b"".join(lines))


def record_exchanged(at, draw):
    path, lines = lines_of(at)
    place = draw.randrange(1, len(lines))
    lines[place - 1 : place + 1] = lines[place - 1 : place + 1][::-1]
    path.write_bytes(b"".join(lines))


def record_cut(at, draw):
    path, lines = lines_of(at)
    path.write_bytes(b"".join(lines)[: -draw.choice([1, 2, 50, 500])])


def record_byte(at, draw):
    flip(at / "run/events.jsonl", draw)


def snapshots_of(at):
    return sorted((at / "run").glob("step-*"))


def snapshot_byte(at, draw):
    flip(draw.choice(sorted(draw.choice(snapshots_of(at)).glob("*.safetensors"))), draw)


def snapshot_manifest(at, draw):
    flip(draw.choice(snapshots_of(at)) / "manifest.json", draw)


def snapshot_removed(at, draw):
    shutil.rmtree(draw.choice(snapshots_of(at)))


def snapshot_file_removed(at, draw):
    draw.choice(sorted(draw.choice(snapshots_of(at)).iterdir())).unlink()


def snapshot_file_added(at, draw):
    (draw.choice(snapshots_of(at)) / "more.txt").write_text("more")


def snapshots_exchanged(at, draw):
    one, other = draw.sample(snapshots_of(at), 2)
    one.rename(at / "other")
    other.rename(one)
    (at / "other").rename(other)


def order_byte(at, draw):
    (path,) = (at / "run/record").glob("order-*.bin")
    flip(path, draw)


def order_removed(at, draw):
    (path,) = (at / "run/record").glob("order-*.bin")
    path.unlink()


def write_receipt(at, change):
    """Change the receipt, and make its own digest fit again."""
    receipt = read(at / "receipt")
    change(receipt)
    (at / "receipt").write_bytes(receipts._to_bytes(receipt))


def receipt_head(at, draw):
    write_receipt(at, lambda receipt: receipt["chain"].update(head=draw.randbytes(32).hex()))


def receipt_option(at, draw):
    write_receipt(at, lambda receipt: receipt["starts"][0]["options"].update(seed=7))


def receipt_environment(at, draw):
    write_receipt(at, lambda receipt: receipt["starts"][0]["environment"].update(torch="9.9"))


def receipt_snapshot(at, draw):
    def change(receipt):
        name = draw.choice(sorted(receipt["snapshots"]))
        del receipt["snapshots"][name]

    write_receipt(at, change)


def receipt_byte(at, draw):
    flip(at / "receipt", draw)


def receipt_steps(at, draw):
    write_receipt(at, lambda receipt: receipt["chain"].update(steps=draw.randrange(9)))


FOUND = (
    *(chain_byte, chain_part, chain_exchanged, chain_cut, chain_relinked, chain_removed),
    *(record_loss, record_rate, record_option, record_code, record_length, record_plan),
    *(record_order, record_state, record_removed, record_exchanged, record_cut, record_byte),
    *(snapshot_byte, snapshot_manifest, snapshot_removed, snapshot_file_removed),
    *(snapshot_file_added, snapshots_exchanged, order_byte, order_removed),
    *(receipt_head, receipt_option, receipt_environment, receipt_snapshot, receipt_byte),
    receipt_steps,
)


def status_of(at, *flags):
    """Return the exit status of a check."""
    return main(["receipt", "check", str(at / "receipt"), str(at / "run"), *flags])


def tampered(trained, tmp_path, change, number):
    """Return a changed copy of the run and its receipt."""
    at = tmp_path / f"{change.__name__}-{number}"
    shutil.copytree(trained, at)
    change(at, random.Random(f"{change.__name__} {number}"))
    return at


def test_a_run_and_its_receipt_agree(trained, capsys):
    before = [(p, p.stat().st_mtime_ns) for p in sorted((trained / "run").rglob("*"))]
    assert status_of(trained) == 0
    printed = capsys.readouterr().out
    assert "all links of the chain, 10 steps: as it should be" in printed
    assert "no anchor: whoever can write" in printed
    assert "not checked: that these digests are of what the code does" in printed
    assert [(p, p.stat().st_mtime_ns) for p in sorted((trained / "run").rglob("*"))] == before
    receipt = read(trained / "receipt")
    *_, head, _, digest = anchor_of(receipt).split()
    assert status_of(trained, "--head", head) == status_of(trained, "--head", digest) == 0
    assert status_of(trained, "--head", "0" * 64) == 1
    assert status_of(trained, "--head", "abc") == 2
    assert len(receipt["snapshots"]) == 3
    assert receipt["starts"][0]["options"]["lanes"] == 2


@pytest.mark.parametrize(
    "numbers", [range(1), pytest.param(range(1, 7), marks=pytest.mark.long)], ids=["one", "more"]
)
@pytest.mark.parametrize("change", FOUND, ids=[change.__name__ for change in FOUND])
def test_what_was_changed_is_found(change, numbers, trained, tmp_path, capsys):
    for number in numbers:
        at = tampered(trained, tmp_path, change, number)
        assert status_of(at) in {1, 2}, number
        printed = capsys.readouterr()
        assert "DIFFERENT" in printed.out or printed.err.startswith("samestep: error: ")
        assert "Traceback" not in printed.err


def test_a_run_that_is_written_anew_with_its_receipt_differs_only_from_the_anchor(
    trained, tmp_path, capsys
):
    def change(at, draw):
        relinked(at, 9, [draw.randbytes(8) for _ in range(4)])
        with_head = Chain.open(at / "run")
        head = with_head.head_after(10).hex()
        with_head.close()
        edit(at, draw, "finished", lambda event: event.update(note="another"))
        path, lines = lines_of(at)
        old = read(at / "receipt")["chain"]["head"].encode()
        path.write_bytes(b"".join(lines).replace(old, head.encode()))
        (at / "receipt").write_bytes(receipts._to_bytes(make(at / "run")))

    at = tampered(trained, tmp_path, change, 0)
    assert status_of(at) == 0
    assert status_of(at, "--head", read(trained / "receipt")["chain"]["head"]) == 1
    assert "the anchor: DIFFERENT" in capsys.readouterr().out


def test_a_run_that_goes_on_still_has_its_receipt(trained, tmp_path, capsys):
    at = tmp_path / "longer"
    shutil.copytree(trained, at)
    oldest = min((at / "run").glob("step-*"))
    path, lines = lines_of(at)
    path.write_bytes(b"".join(lines) + b'{"event":"evaluated","step":10}\n{"event":"torn')
    header, rows = rows_of(at)
    chain = Chain.open(at / "run")
    head = link(chain.head_after(10), 10, chain.seed, (b"12345678",) * 4)
    chain.close()
    (at / "run" / FILE).write_bytes(header + b"".join(rows) + head + b"12345678" * 4)
    assert status_of(at) == 0
    shutil.rmtree(oldest)  # as keep_last does
    assert status_of(at) == 0
    assert "(not checked: 1 snapshot that the run has removed since)" in capsys.readouterr().out
    (at / "run" / FILE).write_bytes(header + b"".join(rows))  # it has not gone on
    assert status_of(at) == 1


def test_a_chain_that_begins_late_does_not_claim_the_steps_before(trained, tmp_path, capsys):
    at = tmp_path / "late"
    shutil.copytree(trained, at)
    (at / "run" / FILE).unlink()
    ChainFile(at / "run", 10, 0, origin(0)).close()
    assert main(["receipt", "make", str(at / "run"), "--out", str(at / "receipt")]) == 0
    status_of(at)
    assert "all links of the chain, 0 steps from step 10 on" in capsys.readouterr().out


def test_another_rate_in_the_chain_than_in_the_record_is_found(trained, tmp_path, capsys):
    def change(at, draw):
        _, rows = rows_of(at)
        parts = [rows[3][n : n + 8] for n in range(32, 64, 8)]
        parts[2] = rows[2][48:56]
        relinked(at, 3, parts)
        path, lines = lines_of(at)
        text = b"".join(line for line in lines if b'"event":"state"' not in line)
        path.write_bytes(text)
        (at / "receipt").write_bytes(receipts._to_bytes(make(at / "run")))

    at = tampered(trained, tmp_path, change, 0)
    assert status_of(at) == 1
    assert "first at step 3: the record has another rate" in capsys.readouterr().out


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[]", b"nothing", b"\xff", b'{"format": 2, "digest": ""}', b"[" * 100_000],
    ids=["empty", "object", "list", "text", "bytes", "newer", "deep"],
)
def test_what_is_no_receipt_is_refused(content, tmp_path):
    (tmp_path / "receipt").write_bytes(content)
    with pytest.raises(RecordError, match=r"is no receipt|must have format 1, got 2"):
        read(tmp_path / "receipt")


def test_a_run_without_a_chain_or_record_has_no_receipt(tmp_path):
    with pytest.raises(RecordError, match="cannot read a record"):
        make(tmp_path)
    (tmp_path / "events.jsonl").write_text('{"event": "started", "step": 0, "continues": true}\n')
    with pytest.raises(RecordError, match=r"has no record of a run|cannot read a chain"):
        make(tmp_path)


def test_making_and_checking_need_neither_torch_nor_numpy(trained, tmp_path):
    program = (
        "import sys; from samestep.cli import main\n"
        f"assert main(['receipt', 'make', {str(trained / 'run')!r}, '--out', 'own']) == 0\n"
        f"assert main(['receipt', 'check', 'own', {str(trained / 'run')!r}]) == 0\n"
        "print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    """A run of a script of 12 steps by two workers, one of which was killed, and its receipt."""
    folder = tmp_path_factory.mktemp("scripted")
    script = folder / "train.py"
    shutil.copy(SCRIPT, script)
    flags = ["--dir", folder / "run", "--snapshot-every", 4, "--keep-last", 9]
    run_python(
        *("-m", "samestep", "run", "-n", 2, *flags, script, 192, 0, 1),
        check=True,
        env={**os.environ, "KILLS": "6 1"},
    )
    assert main(["receipt", "make", str(folder / "run"), "--out", str(folder / "receipt")]) == 0
    return folder


def repeat(at, script, *flags, arguments=("192", "0", "1")):
    words = ["receipt", "replay", str(at / "receipt"), str(at / "run"), *flags]
    return main([*words, str(script), *arguments])


def test_segments_are_repeated_with_the_same_rows(scripted, capfd):
    before = [(p, p.stat().st_mtime_ns) for p in sorted((scripted / "run").rglob("*"))]
    assert repeat(scripted, scripted / "train.py", "--segments", "2", "--seed", "3") == 0
    printed = capfd.readouterr().out
    assert printed.count("and the state after them: as it should be") == 2
    # the snapshot before the kill may not have been complete
    assert re.search(r"repeated 2 of [23] segments .--seed 3.: (8|12) of 12 steps", printed)
    assert [(p, p.stat().st_mtime_ns) for p in sorted((scripted / "run").rglob("*"))] == before


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        ("0.01)", "0.02)", "rates"),
        pytest.param("nn.ReLU()", "nn.GELU()", "losses", marks=pytest.mark.long),
        pytest.param("[bad] *= factor", "[7] *= 2", "losses", marks=pytest.mark.long),
        pytest.param("manual_seed(0)", "manual_seed(1)", "losses", marks=pytest.mark.long),
        pytest.param("16, epochs", "16, shuffle=False, epochs", "samples", marks=pytest.mark.long),
        pytest.param("nn.Dropout(0.1)", "nn.Dropout(0.2)", "losses", marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_another_line_of_code_is_found_by_the_replay_only(
    old, new, part, scripted, tmp_path, capfd
):
    (tmp_path / "train.py").write_text(SCRIPT.read_text().replace(old, new, 1))
    assert status_of(scripted) == 0
    capfd.readouterr()
    assert repeat(scripted, tmp_path / "train.py", "--segments", "9") == 1
    printed = capfd.readouterr().out
    assert "and the state after them: DIFFERENT, head from step 0, " in printed
    assert f"{part} from step " in printed
    assert "program from step 0" in printed


def test_another_mean_in_the_record_is_found_by_the_replay_only(scripted, tmp_path, capfd):
    def change(at, draw):
        path, lines = lines_of(at)
        (number,) = (
            n for n, line in enumerate(lines) if b'"scalars"' in line and b'"step":2,' in line
        )
        event = json.loads(lines[number])
        event["values"]["close"] += 0.25
        lines[number] = json.dumps(event, separators=(",", ":")).encode() + b"\n"
        path.write_bytes(b"".join(lines))
        (at / "receipt").write_bytes(receipts._to_bytes(make(at / "run")))

    at = tampered(scripted, tmp_path, change, 0)
    assert status_of(at) == 0
    assert repeat(at, at / "train.py", "--segments", "9") == 1
    printed = capfd.readouterr().out
    assert "the state after them: DIFFERENT, the logged mean 'close' from step 2" in printed
    assert printed.count("and the state after them: DIFFERENT") == 1
    assert "not compared: evaluations, images, and values that the script logs" in printed


def test_verdicts_say_what_was_compared(trained, capsys):
    verdicts = Verdicts()
    check(read(trained / "receipt"), None, None, verdicts)
    assert not verdicts.differs
    assert "receipt's own digest: as it should be" in capsys.readouterr().out
    assert struct.calcsize("<8sQQQ32s") == HEADER
