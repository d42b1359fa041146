"""The faults that are planted, by kind, with the loops of docs/loops that get them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.mutations.plant import planted

FOLDER: Final = Path(__file__).parents[2] / "docs/loops"
LANES: Final = (
    *("tutorial", "imagenet", "gpt", "dcgan", "vae", "detr", "segmentation", "distillation", "dqn"),
)
ALL: Final = (*LANES, "contrastive")


@dataclass(frozen=True)
class Kind:
    """A kind of fault: what it changes (see `planted`), in which loops.

    `needs_kill` says that only a kill and a resume can show it.
    """

    name: str
    loops: Sequence[str]
    inserted: Mapping[str, str] = field(default_factory=dict)
    forgotten: Sequence[tuple[str, str]] = ()
    replaced: Mapping[str, str] = field(default_factory=dict)
    needs_kill: bool = False


TRACKED: Final = (  # what is not tracked any more, which a resume then begins anew
    ("optimizer", ("imagenet", "gpt", "vae", "detr", "segmentation", "contrastive", "dqn")),
    ("model", ("tutorial", "segmentation")),
    ("scheduler", ("imagenet", "gpt")),
    ("ema", ("distillation",)),
    ("target", ("dqn",)),
    ("optimizer_d", ("dcgan",)),
)
KINDS: Final = (
    *(
        Kind(f"{name} is not tracked", loops, forgotten=[(name, "run.track")], needs_kill=True)
        for name, loops in TRACKED
    ),
    Kind(
        "a generator of the script in a lane",
        ("tutorial", "gpt", "vae", "distillation"),
        {
            "module": "noise = torch.Generator()",
            "lane": "{loss} = {loss} * (1 + 0.1 * torch.rand((), generator=noise))",
        },
    ),
    Kind(
        "a generator that the system seeds",
        ("imagenet", "detr"),
        {
            "module": "import numpy\nnoise = numpy.random.default_rng()",
            "lane": "{loss} = {loss} * (1 + 0.1 * noise.random())",
        },
    ),
    Kind(
        "random.Random in a lane",
        ("segmentation", "dqn"),
        {
            "module": "import random\nnoise = random.Random(0)",
            "lane": "{loss} = {loss} * (1 + 0.1 * noise.random())",
        },
    ),
    Kind(
        "the time in a loss",
        ("dcgan", "vae"),
        {"module": "import time", "lane": "{loss} = {loss} * (1 + time.time() % 1)"},
    ),
    Kind(
        "the process id in a loss",
        ("tutorial", "dqn"),
        {"module": "import os", "lane": "{loss} = {loss} * (1 + os.getpid() % 97)"},
    ),
    Kind(
        "data from the time",
        ("tutorial", "distillation", "contrastive"),
        {"module": "import time"},
        replaced={
            "torch.Generator().manual_seed(0)": "torch.Generator().manual_seed(time.time_ns())"
        },
    ),
    Kind(
        "data in an order of the rank",
        ("tutorial", "gpt", "detr", "contrastive"),
        replaced={
            "run.batches": "(lambda rows, *args, **options: run.batches(torch.utils.data.Subset("
            "rows, [(n + run.rank) % len(rows) for n in range(len(rows))]), *args, **options))"
        },
    ),
    Kind(
        "a batch size of the number of workers",
        ("tutorial", "vae", "contrastive"),
        replaced={"BATCH_SIZE": "BATCH_SIZE * run.world_size"},
    ),
    Kind(
        "a learning rate of the number of workers",
        ("gpt", "imagenet", "contrastive"),
        {"begin": "{optimizer}.param_groups[0]['lr'] *= run.world_size"},
    ),
    Kind(
        "a loss divided by the number of workers",
        ("tutorial", "detr", "distillation"),
        {"lane": "{loss} = {loss} / run.world_size"},
    ),
    Kind(
        "a gradient that one rank changes",
        ("tutorial", "vae", "contrastive"),
        {
            "update": "if run.rank == 1:\n"
            "    for parameter in {model}.parameters():\n"
            "        parameter.grad.mul_(2)"
        },
    ),
    Kind(
        "a weight that one rank changes",
        ("segmentation", "dcgan"),
        {
            "end": "if run.rank == 1:\n"
            "    with torch.no_grad():\n"
            "        next({model}.parameters()).add_(1)"
        },
    ),
    Kind(
        "a model in evaluation on one rank",
        ("imagenet", "segmentation", "gpt"),
        {"begin": "if run.rank == 1:\n    {model}.eval()"},
    ),
    Kind(
        "a lane that one rank leaves out",
        ("tutorial", "vae"),
        {"lane": "if run.rank == 1 and run.step == 1:\n    continue"},
    ),
    Kind("lanes that are left", ("gpt", "dqn"), {"after": "break"}),
    Kind(
        "an update inside a lane",
        ("tutorial", "segmentation", "distillation"),
        {"after": "{optimizer}.step()"},
    ),
    Kind(
        "clipping inside a lane",
        ("gpt", "vae"),
        {"after": "torch.nn.utils.clip_grad_norm_({model}.parameters(), 0.01)"},
    ),
    Kind(
        "a collective inside a lane",
        ("tutorial", "detr"),
        {"lane": "{loss} = {loss} * run.all_gather(1.0)[0]"},
    ),
    Kind(
        "losses summed over this worker's lanes",
        ("tutorial", "imagenet", "segmentation", "dqn"),
        {
            "begin": "running = 0.0",
            "after": "running += {loss}.item()",
            "end": "run.log(running=running)",
        },
    ),
    Kind(
        "the loss of the last lane is logged",
        ("vae", "distillation", "detr"),
        {"end": "run.log(last={loss}.item())"},
    ),
    Kind(
        "a list that lanes fill",
        ("gpt", "dcgan"),
        {
            "begin": "kept = [0.0]",
            "lane": "{loss} = {loss} + 0.1 * kept[-1]\nkept.append({loss}.item())",
        },
    ),
    Kind(
        "an attribute that lanes count",
        ("tutorial", "segmentation"),
        {
            "begin": "{model}.calls = 0",
            "lane": "{model}.calls += 1\n{loss} = {loss} * {model}.calls",
        },
    ),
    Kind(
        "a buffer without a rule",
        ("tutorial", "vae", "imagenet"),
        {
            "lane": "{model}.total += {inputs}.sum()",
        },
        replaced={
            "super().__init__": "(lambda *parts: (super(type(self), self).__init__(*parts),"
            " self.register_buffer('total', torch.zeros(()))))"
        },
    ),
    Kind(
        "a mean over pixels without count=",
        ("segmentation",),
        forgotten=[("count", "batch.lanes")],
    ),
    Kind(
        "a mean of the means of some samples",
        ("tutorial", "distillation"),
        {"lane": "{loss} = ({loss} * (labels > 2)).sum() / (labels > 2).sum()"},
    ),
    Kind(
        "a counter of the script in a schedule",
        ("tutorial", "vae", "distillation", "contrastive"),
        {
            "begin": "seen = 0",
            "end": "seen += 1\n{optimizer}.param_groups[0]['lr'] = 0.01 / seen",
        },
        needs_kill=True,
    ),
    Kind(
        "a moving average in a variable",
        ("gpt", "segmentation"),
        {
            "begin": "average = 0.0",
            "update": "average = 0.9 * average + float(batch.means['loss'])\n"
            "for group in {optimizer}.param_groups:\n"
            "    group['lr'] = 1e-3 / (1 + average)",
        },
        needs_kill=True,
    ),
    Kind(
        "a generator of the loop's body",
        ("detr",),
        {
            "module": "noise = torch.Generator().manual_seed(1)",
            "update": "for group in {optimizer}.param_groups:\n"
            "    group['lr'] = 1e-3 * float(torch.rand((), generator=noise))",
        },
        needs_kill=True,
    ),
    Kind(
        "an end of the number of workers",
        ("tutorial", "contrastive"),
        {"end": "if run.world_size > 1 and run.step == 1:\n    break"},
    ),
)


@dataclass(frozen=True)
class Mutation:
    """A fault in a loop."""

    kind: Kind
    loop: str

    def script(self) -> str:
        """Return the script of the loop with the fault."""
        kind, source = self.kind, (FOLDER / f"{self.loop}.py").read_text()
        return planted(source, kind.inserted, iter(kind.forgotten), kind.replaced)


def mutations() -> Iterator[Mutation]:
    """Yield all faults in all loops."""
    for kind in KINDS:
        for loop in kind.loops:
            yield Mutation(kind, loop)
