"""`samestep adopt` sees what libraries and other files of a project do, and what a resume loses."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import samestep
from samestep.host import parse
from samestep.tools.adopt import plan

TORCH = """\
import torch
from torch import nn
from torch.utils.data import DataLoader
"""
MODEL = """\
net = Net()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
"""
LOOP = """\
for epoch in range(9):
    for images, labels in loader:
        loss = net(images)
        loss.backward()
        optimizer.step()
"""
EPOCHS = """\
from library.data import create_loader
loader = create_loader(train_set)
def train(loader):
    total = 0
    for images in loader:
        loss = net(images)
        loss.backward()
        optimizer.step()
        {body}
    return total
for epoch in range(9):
    train(loader)
"""
FACTORY = "from library.data import create_loader, build\n{made}\n" + MODEL
METRICS = "batch.backward(loss, **metrics)\n"
SEVERAL = f"import torch.distributed as dist\ndist.init_process_group()\n{MODEL}"


def factory(made, iterated="loader"):
    return FACTORY.format(made=made) + LOOP.replace("in loader", f"in {iterated}")


def summed(line):
    return MODEL + EPOCHS.format(body=line)


def averaged(line):
    return f"from copy import deepcopy\n{MODEL}ema = deepcopy(net)\n{line}\n" + factory(
        "loader = DataLoader(train_set, 8)"
    )


def evaluated(line):
    loop = f"for images in DataLoader(test_set, 9):\n    {line}\n"
    return factory("loader = DataLoader(train_set, 8)") + loop


def trainer(keyword):
    return f"""\
from transformers import Trainer, TrainingArguments
arguments = TrainingArguments("out", {keyword})
Trainer(model, arguments).train()
"""


def lightning(keyword):
    return f"import lightning as L\ntrainer = L.Trainer({keyword})\ntrainer.fit(module, loader)\n"


# what a script has: the kind of the entry, the code that it names, and what is written for it
KINDS = {
    "a factory": (
        factory("loader = create_loader(train_set, 224, batch_size=64)"),
        *("unseen", "loader = create_loader(", "loader = run.batches(train_set, 64)"),
    ),
    "a factory of several workers": (
        SEVERAL + factory("loader = create_loader(dataset=images, batch_size=args.batch)"),
        *("unseen", "loader = create_", "loader = run.batches(images, args.batch * WORKERS)"),
    ),
    "a factory with options": (
        factory(
            "options = dict(batch_size=8)\nloader_train = build(cfg, **options)", "loader_train"
        ),
        *("unseen", "loader_train = ", "loader_train = run.batches(dataset, 8)"),
    ),
    "a factory without a size": (
        factory("train_iter, test_iter = build(cfg)", "train_iter"),
        *("unseen", "train_iter = build(cfg)", "train_iter = run.batches(dataset, GLOBAL)"),
    ),
    "an iterable of another name": (
        factory("batches = build(cfg)", "batches"),
        *("changes", "for images, labels in batches:", "for batch in run.batches(dataset, GLOBAL)"),
    ),
    "a factory for an evaluation": (
        factory("loader = create_loader(train_set)\ntest_loader = build(test_set, batch_size=9)")
        + "for images in test_loader:\n    print(net(images))\n",
        *("unseen", "test_loader = ", "run.evaluate(scores_of, net, test_set, 9)"),
    ),
    "a module that is not there": ("import utils\n", "unseen", "utils", ""),
    "a package that is not there": (
        "from models.resnet import Net\n",
        "unseen",
        "models.resnet",
        "",
    ),
    "a relative module that is not there": ("from .engine import go\n", "unseen", ".engine", ""),
    "a package above the script": ("from project import Net\n", "unseen", "project", ""),
    "a rank behind an attribute": (
        f"{SEVERAL}from timm import utils\nutils.random_seed(args.seed, args.rank)\n",
        *("goes", "utils.random_seed(args.seed, args.rank)", "ss.init(seed=args.seed)"),
    ),
    "workers behind an attribute": (
        f"{SEVERAL}size = args.batch * cfg.args.world_size * args.accum\n",
        *("breaks", "args.batch * cfg.args.world_size", "args.batch * WORKERS"),
    ),
    "workers behind a key": (
        f"{SEVERAL}rate = 0.1 * config['world_size']\n",
        *("breaks", "0.1 * config['world_size']", "0.1 * WORKERS"),
    ),
    "a use of torch.distributed without its import": (
        f"{MODEL}torch.distributed.barrier()\nrate = 0.1 * args.world_size\n",
        *("breaks", "0.1 * args.world_size", "0.1 * WORKERS"),
    ),
    "an average that starts late": (
        averaged("update(ema, net, decay=0)"),
        "breaks",
        "update(",
        "upd",
    ),
    "an average that loads late": (
        averaged("ema.load_state_dict(net.state_dict())"),
        *("breaks", "ema.load_state_dict(net.state_dict())", "ema.load"),
    ),
    "a target network that loads late": (
        averaged("frozen.load_state_dict(net.state_dict())"),
        *("breaks", "frozen.load_state_dict(net.state_dict())", "frozen.load"),
    ),
    "a schedule that starts late": (
        averaged("scheduler = build(optimizer)\nscheduler.step(start_epoch)"),
        *("goes", "scheduler.step(start_epoch)", ""),
    ),
    "a sum of an epoch": (
        summed("total += loss.item()"),
        "breaks",
        "total += loss.item()",
        f'{METRICS}sums["total"] += batch.means["loss"] * batch.size\nrun.track(sums=sums)',
    ),
    "a number of samples": (
        summed("total += images.size(0)"),
        *("breaks", "total += ", 'sums["total"] += batch.size\nrun.track(sums=sums)'),
    ),
    "a meter of an epoch": (
        summed("meter.update(loss.item(), 8)").replace("    total = 0", "    meter = Meter()"),
        "breaks",
        "meter.update(loss.item(), 8)",
        f'{METRICS}meter.update(batch.means["loss"], batch.size)',
    ),
    "a list of an epoch": (
        summed("total.append(loss.item())").replace("total = 0", "total = []"),
        "breaks",
        "total.append(loss.item())",
        f'{METRICS}total.append(batch.means["loss"])\nrun.track(total=total)',
    ),
    "a sum of the whole job": (
        f"total = 0\n{summed('total += loss.item()').replace('    total = 0', '    global total')}",
        *(
            "breaks",
            "total += loss.item()",
            f"{METRICS}run.log(batch.means)",
        ),
    ),
    "an exit at NaN": (
        summed("if loss.isnan(): sys.exit(1)"),
        *("goes", "sys.exit(1)", 'ss.init(nonfinite_loss="stop")'),
    ),
    "a sum in an evaluation": (
        evaluated("total += F.mse_loss(net(images), images, reduction='sum')"),
        *("changes", "reduction='sum'", 'reduction="mean"'),
    ),
    "a short evaluation": (
        evaluated("if late: break"),
        *("changes", "break", "torch.utils.data.Subset(dataset, range(N))"),
    ),
    "a metric object": (
        f"from torchmetrics.classification import Accuracy\n{MODEL}metric = Accuracy()\n",
        *("changes", "Accuracy()", "run.evaluate(scores_of, net, dataset, GLOBAL)"),
    ),
    "models of a library": (
        "import timm\none, two = timm.create_model(1), timm.create_model(2)\n",
        *("breaks", "timm.create_model(1) and 1 more", ""),
    ),
    "a folder with a time": (
        f"{MODEL}from datetime import datetime\nname = datetime.now().strftime('%H')\n",
        *("breaks", "datetime.now().strftime('%H')", 'dir="runs/train"'),
    ),
    "accumulation of the Trainer": (
        trainer("gradient_accumulation_steps=4"),
        *("goes", "gradient_accumulation_steps=4", "ss.init(lanes=...)"),
    ),
    "DDP of the Trainer": (
        trainer("ddp_find_unused_parameters=False"),
        *("goes", "ddp_find_unused_parameters=False", ""),
    ),
    "checkpoints of the Trainer": (
        trainer("save_total_limit=2"),
        *("goes", "save_total_limit=2", "ss.init(keep_last=..., keep_best=...)"),
    ),
    "snapshots of the Trainer": (
        trainer("save_steps=9"),
        "changes",
        "save_steps=9",
        "save_steps=9",
    ),
    "half precision of the Trainer": (
        trainer("fp16=True"),
        *("changes", "fp16=True", 'ss.init(precision="bfloat16")'),
    ),
    "a resume of the Trainer": (
        trainer("").replace(".train()", ".train(resume_from_checkpoint=path)"),
        *("goes", "resume_from_checkpoint=path", "ss.init(dir=...)"),
    ),
    "accumulation of Lightning": (
        lightning("accumulate_grad_batches=2"),
        *("goes", "accumulate_grad_batches=2", "ss.init(lanes=...)"),
    ),
    "DDP of Lightning": (
        lightning("strategy='ddp'"),
        *("goes", "strategy='ddp'", "samestep run -n N"),
    ),
    "a resume of Lightning": (
        lightning("").replace("loader)", "loader, ckpt_path=path)"),
        *("goes", "ckpt_path=path", "ss.init(dir=..., snapshot_every=...)"),
    ),
    "precision of Fabric": (
        "from lightning.fabric import Fabric\nfabric = Fabric(precision='16-mixed')\n",
        *("changes", "precision='16-mixed'", 'ss.init(precision="bfloat16")'),
    ),
}


@pytest.fixture
def planned(tmp_path, monkeypatch):
    """A function that returns the entries of a script in a folder beside a package."""
    folder = tmp_path / "scripts"
    folder.mkdir()
    (tmp_path / "project").mkdir()
    (tmp_path / "project/__init__.py").touch()
    monkeypatch.chdir(folder)

    def entries_of(text):
        Path("train.py").write_text(TORCH + text)
        start, *entries = plan(Path("train.py"))
        assert "ss.init" in start.write
        return entries

    return entries_of


@pytest.mark.parametrize(("text", "kind", "name", "write"), KINDS.values(), ids=KINDS)
def test_a_kind_has_its_entry(planned, text, kind, name, write):
    entries = [entry for entry in planned(text) if entry.name.startswith(name)]
    assert [(entry.kind, entry.write[: len(write)]) for entry in entries][:1] == [(kind, write)]
    assert {entry.kind for entry in entries[1:]} <= {"unseen"}


def test_what_an_unknown_loop_iterates_is_named_with_its_line(planned):
    entries = planned(factory("batches = build(cfg)", "batches"))
    (entry,) = (entry for entry in entries if entry.kind == "unseen")
    assert entry.write == "run.batches(dataset, GLOBAL)"
    assert entry.say.startswith("whether `batches` of line 5 gives batches of a DataLoader")


# lines that have no entry of these rules
INNOCENT = {
    "an average that starts early": (f"ema.load_state_dict(net.state_dict())\n{MODEL}", "ema.load"),
    "an average that starts again": (
        averaged("") + "    ema.load_state_dict(net.state_dict())\n",
        "ema.load",
    ),
    "a sum within a step": (
        summed("total = 0\n        for part in parts: total += part.item()"),
        "total += part",
    ),
    "a library": (
        "from timm.utils import accuracy\nimport networkx, scipy.data\n",
        ("scipy", "networkx"),
    ),
    "a rank of a matrix": (f"{MODEL}rate = 0.1 * args.rank * args.world_size\n", "0.1"),
    "options of a loader": (
        factory("loader_options = dict(batch_size=8)\nloader = DataLoader(data, **loader_options)"),
        "loader_options =",
    ),
    "options of another call": (
        f"{MODEL}Other(fp16=True, save_steps=3, strategy='ddp')\n",
        "Other",
    ),
}


@pytest.mark.parametrize(("text", "name"), INNOCENT.values(), ids=INNOCENT)
def test_what_is_no_such_kind_has_none(planned, text, name):
    assert [entry for entry in planned(text) if entry.name.startswith(name)] == []


def test_flags_that_lose_their_use_are_one_entry(planned):
    flags = ("--world-size", "--local_rank", "--dist-url", "-r', '--resume", "--lora_rank", "--lr")
    lines = "".join(f"parser.add_argument('{flag}', type=int)\n" for flag in flags)
    entries = planned(f"import argparse\nparser = argparse.ArgumentParser()\n{lines}{MODEL}")
    (entry,) = (entry for entry in entries if entry.name.startswith("--"))
    assert (entry.kind, entry.name) == ("goes", "--world-size and 3 more")
    assert entry.say.endswith(": --world-size, --local_rank, --dist-url, --resume")


def test_what_the_trainer_refuses_has_an_entry(planned):
    """`transformers` need not be installed: the names are read from the source."""
    source = (Path(samestep.__file__).parent / "integrations/huggingface.py").read_text()
    (refused,) = (
        node.value
        for node in ast.walk(parse(source))
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "REFUSED"
    )
    names = [name for name in ast.literal_eval(refused) if "." not in name]
    entries = planned(trainer(", ".join(f"{name}=1" for name in names)))
    assert {f"{name}=1" for name in names} - {entry.name for entry in entries} == set()


@pytest.mark.parametrize(
    ("uses", "files"),
    [
        ("from models import make\nmake()\n", {"net.py"}),
        ("import models\nmodels.make()\n", {"net.py"}),
        ("import models\nmodels.Other()\n", {"net.py", "other.py"}),
        ("from models.other import Other\n", {"other.py"}),
        ("import models, late\n", {"net.py", "other.py"}),
    ],
)
def test_of_a_package_only_what_is_read_is_followed(planned, uses, files):
    models = Path("models")
    models.mkdir()
    start = "from .net import build\nfrom .other import Other\ndef make():\n    return build()\n"
    (models / "__init__.py").write_text(start)
    for name in ("net.py", "other.py"):
        (models / name).write_text("import torch\ntorch.cuda.set_device(0)\n")
    Path("late.py").write_text("import models\nmodels.Other()\n")
    entries = planned(f"{MODEL}{uses}")
    assert {Path(entry.file).name for entry in entries} - {"train.py"} == files


def test_buffers_outside_of_classes_are_no_error(planned):
    assert planned(f"{MODEL}net.register_buffer('center', torch.zeros(3))\n")[-1].kind == "prove"
