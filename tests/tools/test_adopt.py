"""`samestep adopt` finds what a script has to change, says nothing wrong, and never fails."""

from __future__ import annotations

import json
import os
import random
import re
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samestep import cli
from samestep.errors import ConfigError
from samestep.tools.adopt import plan
from samestep.tools.adopt.rules import roles, rules
from samestep.tools.adopt.source import MOST_BYTES
from tests.docs import moving
from tests.docs.blocks import ROOT

LOOPS = sorted((ROOT / "docs/loops").glob("*.py"))
IMPORTS = """\
import os, random, sys, time, glob
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
"""
PLAIN = "".join(line for line in IMPORTS.splitlines(keepends=True) if "istributed" not in line)
LOOP = """\
net = Net()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
loader = DataLoader(data, 32, shuffle=True)
for epoch in range(EPOCHS):
    for images, labels in loader:
        loss = F.cross_entropy(net(images), labels)
        loss.backward()
        optimizer.step()
"""


@pytest.fixture
def planned(tmp_path, monkeypatch):
    """A function that returns the entries of a script, by their names without those of `LOOP`."""
    monkeypatch.chdir(tmp_path)

    def entries_of(text, **files):
        for name, content in files.items():
            Path(f"{name}.py").write_text(content)
        Path("train.py").write_text(text)
        return plan(Path("train.py"))

    return entries_of


def found(entries, name):
    """Return what is written for entries whose code is `name`."""
    return [entry.write for entry in entries if entry.name == name]


def in_loop(line):
    """Return the plain loop with a line at its end."""
    return f"{IMPORTS}{LOOP}        {line}\n"


def test_a_plain_script_has_a_complete_plan(planned):
    entries = planned(PLAIN + LOOP)
    lines = PLAIN.count("\n")
    assert {(e.kind, e.line - lines, e.name): e.write for e in entries} == {
        ("changes", 1, "net = Net()"): (
            'import samestep as ss\nwith ss.init(lanes=8, dir="runs/train") as run:\n    ...'
        ),
        ("changes", 1, "net"): "net = run.replicate(net)",
        ("changes", 2, "optimizer"): "run.track(net=net, optimizer=optimizer)",
        ("changes", 3, "loader"): "loader = run.batches(data, 32)",
        ("changes", 4, "for epoch in range(EPOCHS):"): "for epoch in range(run.epoch, EPOCHS):",
        ("changes", 5, "for images, labels in loader:"): (
            "for batch in loader:\n    for images, labels in batch.lanes(net):"
        ),
        ("changes", 7, "loss.backward()"): "batch.backward(loss)",
        ("changes", 8, "optimizer.step()"): "optimizer.step()",
        ("prove", 1 - lines, "verify"): "samestep verify -n 1,2 --kill train.py",
    }


def test_the_page_has_the_rules():
    page = moving.PAGE.read_text()
    assert moving.with_tables(page) == page
    shown = moving.MARK.findall(page)
    assert len(rules()) > 60
    sections = {rule.section for rule in rules().values()} - {"What a plan cannot see"}
    assert {section for _, section in shown} == sections
    assert {"lane", "structure", ""} < {rule.where for rule in rules().values()}
    assert "optimizer" in roles()


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ("BATCH // dist.get_world_size()", "BATCH"),
        ("int(args.batch / world_size)", "args.batch"),
        ("per_worker", "args.batch"),
        ("args.total", "args.total"),
        ("args.batch", "args.batch * WORKERS"),
        ("2 + 2", "(2 + 2) * WORKERS"),
        ("**options", "options_size * WORKERS"),
        ("int(args.batch / torch.cuda.device_count())", "args.batch * HOSTS"),
        ("args.of_host // ngpus_per_node", "args.of_host * HOSTS"),
    ],
)
def test_the_global_batch_size_is_in_the_names_of_the_script(planned, batch, expected):
    text = f"""{IMPORTS}
world_size = dist.get_world_size()
per_worker = args.batch // world_size
args.total //= world_size
options = {{"batch_size": options_size}}
net = DDP(Net())
loader = DataLoader(data, {batch}, sampler=DistributedSampler(data))
for images in loader:
    net(images).backward()
"""
    assert found(planned(text), "loader") == [f"loader = run.batches(data, {expected})"]


def test_loaders_of_a_lightning_trainer_stay_with_the_global_batch_size(planned):
    entries = planned("""import lightning as L
from torch.utils.data import DataLoader
trainer = L.Trainer(devices=4, accumulate_grad_batches=2)
trainer.fit(Net(), DataLoader(data(), 32, shuffle=True))
""")
    (loader,) = found(entries, "DataLoader(data(), 32, shuffle=True)")
    assert loader == "DataLoader(data(), batch_size=32 * 2 * WORKERS, ...)"


@pytest.mark.parametrize(
    ("size", "steps", "expected"),
    [
        ("BATCH", "8", "BATCH * accumulation"),
        ("BATCH // 4", "4 // dist.get_world_size()", "BATCH"),
        ("BATCH", "steps // dist.get_world_size()", "BATCH * steps"),
    ],
)
def test_accumulation_multiplies_the_batch_size(planned, size, steps, expected):
    text = f"""{IMPORTS if "world" in steps else PLAIN}
accumulation = {steps}
loader = DataLoader(data, {size}, shuffle=True)
for number, images in enumerate(loader):
    (net(images) / accumulation).backward()
    if (number + 1) % accumulation == 0:
        optimizer.step()
"""
    entries = planned(text)
    assert found(entries, "loader") == [f"loader = run.batches(data, {expected})"]
    assert [entry.write for entry in entries if "backward()" in entry.name] == [
        "batch.backward(net(images))"
    ]
    goes = [entry for entry in entries if "accumulation" in entry.name and entry.kind == "goes"]
    assert len(goes) == 2


# a line in the body of a loop over a loader: the kind of its entry, and what is written for it
LINES = [
    ("images = images.to(device)", "images.to(device)", "goes", ""),
    ("labels = labels.cuda()", "labels.cuda()", "goes", ""),
    ("total += loss.item()", "total += loss.item()", "breaks", "batch.backward(loss, **metrics)"),
    ("meter.update(loss.item(), 3)", "meter.update(loss.item(), 3)", "breaks", "batch.backward"),
    ("losses.append(loss.item())", "losses.append(loss.item())", "breaks", "batch.backward"),
    ("count += 1", "count += 1", "breaks", "run.step"),
    ("if dist.get_rank() == 0: print(1)", "if dist.get_rank() == 0:", "goes", ""),
    ("if dist.get_rank() == 0: optimizer.step()", "if dist.get_rank() == 0:", "breaks", "run.once"),
    (
        "if time.time() > end: break",
        "if time.time() > end:",
        "breaks",
        "if run.broadcast(time.time",
    ),
    ("if count > 3: break", "break", "changes", "run.batches(...).limit(N)"),
    (
        "nn.utils.clip_grad_norm_(net.parameters(), 2.0)",
        None,
        "changes",
        "run.clip_grad_norm(net, 2.0)",
    ),
    ("dist.all_reduce(loss)", "dist.all_reduce(loss)", "goes", "run.log(batch.means)"),
    ("dist.barrier()", "dist.barrier()", "goes", "run.barrier"),
    ("best = max(best, loss.item())", "best", "breaks", "notes = {"),
    ("rate = 0.1 * dist.get_world_size()", "0.1 * dist.get_world_size()", "breaks", "0.1"),
    ("F.mse_loss(images, labels, reduction='sum')", None, "breaks", "batch.lanes(net, count=count"),
    (
        "F.cross_entropy(images, labels, ignore_index=0)",
        None,
        "breaks",
        "batch.lanes(net, count=count",
    ),
    ("F.cross_entropy(images, labels, weights)", None, "breaks", "batch.lanes(net, count=count"),
    ("load(pretrained=rank == 0)", "pretrained=rank == 0", "breaks", "run.once"),
    ("for name in os.listdir('.'): pass", "os.listdir('.')", "breaks", "sorted(os.listdir('.'))"),
    (
        "for name in list(set(names)): pass",
        "list(set(names))",
        "breaks",
        "sorted(list(set(names)))",
    ),
    (
        "torch.save(net.state_dict(), 'net.pt')",
        None,
        "goes",
        "run.track(net=net, optimizer=optimizer)",
    ),
    ("torch.manual_seed(3)", None, "goes", "ss.init(seed=3)"),
    ("getattr(torch.optim, name)(1)", None, "unseen", ""),
    ("exec(text)", None, "unseen", ""),
    ("key = os.urandom(3)", "os.urandom(3)", "breaks", ""),
    ("for name in sorted(glob.glob('*')): pass", "glob.glob('*')", "", ""),
    ("random.shuffle(names)", None, "", ""),
    ("noise = torch.randn(3)", "torch.randn(3)", "", ""),
    ("print(len(os.listdir('.')))", "os.listdir('.')", "", ""),
]


@pytest.mark.parametrize(("line", "name", "kind", "write"), LINES, ids=[each[0] for each in LINES])
def test_a_line_of_a_loop_has_its_entry(planned, line, name, kind, write):
    at = in_loop("").count("\n")
    entries = [entry for entry in planned(in_loop(line)) if entry.line == at]
    named = [entry for entry in entries if (name or entry.name) == entry.name]
    assert [entry.kind for entry in named][:1] == ([kind] if kind else [])
    assert all(entry.write.startswith(write) for entry in named[:1])


# what follows `if rank == 0: path = make()` in a loop, and the kind of its entry
LATER = {
    "nothing": ("pass", "goes"),
    "a use by all": ("print(path)", "breaks"),
    "a use in a function": ("def late(): print(path)", "breaks"),
    "a use by this worker": ("if rank == 0: print(path)", "goes"),
    "another value for all": ("path = other(); print(path)", "goes"),
    "another value for some": ("if late: path = other()\n        print(path)", "breaks"),
    "another loop": ("for path in paths: print(path)", "goes"),
    "a comprehension": ("print([path for path in paths])", "goes"),
    "another name": ("print(args.path, paths)", "goes"),
}


@pytest.mark.parametrize(("text", "kind"), LATER.values(), ids=LATER)
def test_what_one_worker_assigns_breaks_what_others_read(planned, text, kind):
    entries = planned(f"{in_loop('if rank == 0: path = make()')}        {text}\n")
    (branch, *_) = (entry for entry in entries if entry.name == "if rank == 0:")
    assert (branch.kind, "(`path`)" in branch.say) == (kind, kind == "breaks")


@pytest.mark.parametrize(
    ("lines", "kind"),
    [
        ("path = 'a' if rank == 0 else 'b'\nprint(path)", "breaks"),
        ("print(1 if rank == 0 else 2)", "goes"),
        ("for step in range(9):\n    print(path)\n    if rank == 0: path = 'b'", "breaks"),
        ("if rank == 0: args.path = 'a'\ndef late(args): open(args.path)", "breaks"),
        ("if rank == 0: bar = tqdm(loader)\nelse: bar = loader\nfor x in bar: pass", "goes"),
        ("if rank == 0: log = SummaryWriter()\nshow(log)", "goes"),
    ],
)
def test_a_branch_of_one_worker_is_followed_to_later_uses(planned, lines, kind):
    start = "from torch.utils.tensorboard import SummaryWriter\nfrom tqdm import tqdm\n"
    loader = "loader = DataLoader(data, 8)\n"
    entries = planned(f"{IMPORTS}{start}{loader}{lines}\n")
    kinds = {entry.kind for entry in entries if "rank == 0" in entry.name}
    assert kinds - {"changes"} == {kind}  # which the print is


def test_names_of_the_script_are_not_those_of_the_plan(planned):
    text = LOOP.replace("images, labels in", "batch in").replace("net(images), labels", "*batch")
    entries = planned(f"{PLAIN}run = 'mine'\n{text}def collate(batch): pass\n")
    writes = "\n".join(entry.write for entry in entries)
    assert re.findall(r"(?<!samestep )\brun\b(?!s/)", writes) == []
    assert "as ss_run:" in writes
    assert "for global_batch in loader:\n    for batch in global_batch.lanes(net)" in writes
    assert "global_batch.backward(loss)" in writes
    (start,) = (entry.say for entry in entries if "ss.init" in entry.write)
    line = PLAIN.count("\n") + 1
    assert f"`run` is a name of line {line} of train.py: here, it is `ss_run`" in start
    assert "here, it is `global_batch`" in start


def test_a_function_called_run_is_a_name_of_the_script_too(planned):
    writes = [entry.write for entry in planned(f"{PLAIN}{LOOP}def run(): pass\n")]
    assert any("as ss_run:" in write for write in writes)
    methods = planned(f"{PLAIN}{LOOP}class Job:\n    def run(self): self.run = 1\n")
    assert any("as run:" in entry.write for entry in methods)


def test_many_places_of_one_kind_are_one_entry(planned):
    layers = "\n".join(f"layer{number} = nn.BatchNorm2d({number})" for number in range(91))
    entries = planned(f"{PLAIN}{LOOP}{layers}\n")
    assert [entry.name for entry in entries if "BatchNorm" in entry.name] == [
        "nn.BatchNorm2d(0) and 90 more"
    ]


def test_a_loader_of_fabric_is_said_once(planned):
    text = LOOP.replace("for epoch", "loader = fabric.setup_dataloaders(loader)\nfor epoch")
    entries = planned(f"{PLAIN}from lightning.fabric import Fabric\nfabric = Fabric()\n{text}")
    writes = [entry.write for entry in entries]
    assert sum("run.batches(" in write for write in writes) == 1
    assert found(entries, "fabric.setup_dataloaders(loader)") == [""]


def test_the_lines_of_the_inner_loop_are_said(planned):
    entries = planned(in_loop("for group in optimizer.param_groups: group['lr'] = rate(epoch)"))
    first = IMPORTS.count("\n") + 6
    (loop,) = (entry.say for entry in entries if "batch.lanes" in entry.write)
    assert loop.startswith(f"lines {first} to {first + 1} make the loss")
    (rates,) = (entry.say for entry in entries if entry.name == "optimizer.param_groups")
    assert rates.startswith("outside the loop over the lanes")


def test_own_batches_say_how_many_a_step_has_and_their_evaluation_is_seen(planned):
    text = f"""{IMPORTS}
def evaluate():
    net.eval()
    for number in range(9):
        net(get_batch())
net = Net()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
steps_of_accumulation = 40
steps_of_accumulation //= dist.get_world_size()
while True:
    for number in range(steps_of_accumulation):
        net(get_batch()).backward()
    optimizer.step()
"""
    entries = planned(text)
    (batches,) = (entry.say for entry in entries if "run.streams" in entry.write)
    assert batches.endswith("a step of the old job had steps_of_accumulation of these batches")
    assert found(entries, "for number in range(9):") == [
        "scores = run.evaluate(scores_of, net, val_set, GLOBAL)"
    ]


@pytest.mark.parametrize(
    "made", ["torch.Generator()", "random.Random()", "np.random.default_rng()"]
)
def test_what_is_written_seeds_a_generator(planned, made):
    entries = planned(f"{IMPORTS}draw = {made}\n{LOOP}        images += noise(draw)\n")
    (write,) = (entry.write for entry in entries if entry.name == "draw")
    names = {"run": SimpleNamespace(on_lane_seed=lambda seed: seed(7))}
    exec(f"import random, torch, numpy as np\ndraw = {made}", names)
    numbers = []
    for _ in range(2):
        exec(write, names)
        own = getattr(
            names["draw"], "random", lambda: torch.rand(1, generator=names["draw"]).item()
        )
        numbers.append(own())
    assert numbers[0] == numbers[1]


@pytest.mark.parametrize(
    ("loop", "target"),
    [
        ("for i, (x, y) in enumerate(tqdm(loader)):", "x, y"),
        ("for x, y in map(move, loader):", "x, y"),
        ("for step, (x, y) in zip(range(9), chain.from_iterable(repeat(loader))):", "x, y"),
        ("for x in endless:", "x"),
        ("for x in meter.log_every(loader, 10, 'epoch'):", "x"),
        ("for x in make(3):", "x"),
    ],
)
def test_a_loader_is_seen_through_what_iterates_it(planned, loop, target):
    text = f"""{PLAIN}from itertools import chain, cycle, repeat
from tqdm import tqdm
loader = DataLoader(data, 8, shuffle=True)
endless = cycle(loader)
{loop}
    net(1).backward()
"""
    entries = planned(text)
    lanes = [entry.write for entry in entries if "batch.lanes" in entry.write]
    assert f"    for {target} in batch.lanes(model):" in lanes[0]
    assert [entry.kind for entry in entries].count("unseen") == ("make" in loop)
    assert found(entries, "loader") == ["loader = run.batches(data, 8)"]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda path: path.stem)
def test_the_ten_loops_have_plans_without_false_entries(loop):
    entries = plan(loop)
    if not loop.stem.endswith("_ddp"):
        assert ["this already uses samestep" in entry.say for entry in entries] == [True]
        return
    assert [entry for entry in entries if entry.kind == "unseen"] == []
    after = (ROOT / f"docs/loops/{loop.stem.removesuffix('_ddp')}.py").read_text()
    for name in (
        "run.clip_grad_norm(model, 1.0)",
        "BATCH_SIZE * WORKERS",
        "run.batches(train_set, BATCH_SIZE",
    ):
        writes = any(name in entry.write for entry in entries)
        assert writes <= (name in after), name
    kept = re.findall(r"batch\.backward\(([^,)]+)", after)
    written = {entry.write for entry in entries if "batch.backward(" in entry.write}
    assert written or not kept


BAD = {
    "a folder": (lambda path: path.mkdir(), "is a folder; expected a Python script"),
    "nothing": (lambda path: None, "does not exist; expected"),
    "an empty file": (lambda path: path.write_text(""), "is empty; expected a training script"),
    "comments": (lambda path: path.write_text("# torch\n"), "is empty; expected"),
    "no torch": (lambda path: path.write_text("import os\n"), "imports torch; expected"),
    "a syntax error": (
        lambda path: path.write_text("import torch\nx = (\n"),
        r":2 is not Python 3",
    ),
    "Python 2": (lambda path: path.write_text("import torch\nprint 1\n"), ":2 is Python 2: "),
    "Python 2's except": (
        lambda path: path.write_text("try:\n  1\nexcept ValueError, e:\n  2\n"),
        ":3 is Python 2: ",
    ),
    "another encoding": (lambda path: path.write_bytes(b"x = '\xe9'\n"), "is not text in UTF-8"),
    "an unknown encoding": (
        lambda path: path.write_bytes(b"# coding: x-y\n"),
        "is not text in UTF-8",
    ),
    "null bytes": (
        lambda path: path.write_bytes(b"import torch\0\n"),
        "is not Python: .*null bytes",
    ),
    "deep nesting": (lambda path: path.write_text("x = " + "-" * 100_000 + "1"), "is (not|nested)"),
    "a huge file": (
        lambda path: path.write_text("#" * (MOST_BYTES + 1)),
        "has more than 5000000 bytes",
    ),
    "a pipe": (os.mkfifo, "is not a regular file"),
}


@pytest.mark.parametrize(("write", "message"), BAD.values(), ids=BAD)
def test_what_is_no_script_is_one_clear_line(write, message, tmp_path, capsys):
    path = tmp_path / "train.py"
    write(path)
    assert cli.main(["adopt", str(path)]) == 2
    printed = capsys.readouterr()
    assert re.search(message, printed.err), printed.err
    assert printed.out == ""
    assert printed.err.count("\n") == 1


def test_a_notebook_is_exported_first(tmp_path, capsys):
    (tmp_path / "train.ipynb").write_text("{}")
    assert cli.main(["adopt", str(tmp_path / "train.ipynb")]) == 2
    assert "jupyter nbconvert --to script" in capsys.readouterr().err


def test_other_encodings_are_read_as_they_declare(planned):
    text = f"# coding: latin-1\n{IMPORTS}{LOOP}name = 'é'\n"
    Path("other.py").write_bytes(text.encode("latin-1"))
    assert plan(Path("other.py"))[-1].kind == "prove"


def test_modules_of_the_folder_are_read_and_others_are_not(planned):
    engine = "def train(batches, net):\n    for x in batches:\n        net(x).backward()\n"
    script = f"""{IMPORTS}from engine import train
net = Net()
loader = DataLoader(data, 8, shuffle=True)
train(loader, net)
"""
    entries = planned(script, engine=engine)
    assert ("engine.py", 2) in {(entry.file, entry.line) for entry in entries}
    assert found(entries, "loader") == ["loader = run.batches(data, 8 * WORKERS)"]
    broken = planned(script, engine="def (")
    assert [entry.name for entry in broken if entry.kind == "unseen"] == ["engine.py", "backward"]


def test_a_plan_is_printed_for_people_and_for_programs(planned, capsys):
    planned(f"{PLAIN}{LOOP}import argparse\n")
    assert cli.main(["adopt", "train.py"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "train.py:12  loss.backward()\n      batch.backward(loss)" in text
    assert text.startswith("train.py: 0 to remove, 8 to write anew")
    assert Path(re.search(r"^docs/ is (.*)$", text, re.MULTILINE)[1]).is_dir()
    assert text.rstrip().endswith("docs/verify.md")
    assert "samestep verify -n 1,2 --kill train.py ARGUMENTS" in text
    assert cli.main(["adopt", "--json", "train.py"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert {tuple(entry) for entry in entries} == {
        ("kind", "file", "line", "name", "say", "write", "link")
    }
    planned(f"{IMPORTS}exec(sys.argv[1])\n")
    assert cli.main(["adopt", "train.py"]) == 1


STANDARD = sorted(Path(random.__file__).parent.rglob("*.py"))


@pytest.mark.long
@given(st.sampled_from(STANDARD), st.integers(0, 2**32))
def test_no_script_is_too_strange(tmp_path_factory, path, seed):
    """Real files, with lines left out, as scripts."""
    lines = path.read_text(errors="replace").splitlines()
    draw = random.Random(seed)
    kept = [line for line in lines if draw.random() < 0.98]
    script = tmp_path_factory.mktemp("script") / "train.py"
    script.write_text("\n".join(["import torch", *kept]), errors="replace")
    with suppress(ConfigError):
        entries = plan(script)
        assert entries[-1].kind == "prove"
        assert all(entry.line >= 1 and entry.link for entry in entries)
