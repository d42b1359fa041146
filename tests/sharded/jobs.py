"""Jobs that train the same with replicated and with sharded parameters."""

from __future__ import annotations

import copy
import gc
import hashlib
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import samestep as ss

WORDS = 53
Job = Callable[["ss.Run", Mapping[str, Any]], None]


class Block(nn.Module):
    """No size is a multiple of anything."""

    def __init__(self, width: int, *, checkpoints: bool = False) -> None:
        super().__init__()
        self.norm, self.checkpoints = nn.LayerNorm(width), checkpoints
        self.up, self.down = nn.Linear(width, 2 * width + 1), nn.Linear(2 * width + 1, width)

    def forward(self, x):
        if self.checkpoints and torch.is_grad_enabled():
            return x + checkpoint(self.mix, x, use_reentrant=False)
        return x + self.mix(x)

    def mix(self, x):
        return F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)


class Words(nn.Module):
    """Blocks between an embedding and an output that are tied."""

    def __init__(self, width: int = 20, blocks: int = 3, *, checkpoints: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList([Block(width, checkpoints=checkpoints) for _ in range(blocks)])
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.order = [*range(blocks)]

    def forward(self, words):
        x = self.embedding(words)
        for number in self.order:
            x = self.blocks[number](x)
        return self.head(x)


class Pictures(nn.Module):
    """A network with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Conv2d(c, 6, 3), nn.BatchNorm2d(6), nn.ReLU()) for c in (3, 6)]
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(6 * 16, 5)

    def forward(self, images):
        return self.head(self.layers(images).flatten(1))


def texts(samples: int = 44) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randint(WORDS, (samples, 7), generator=generator))


def loss_fn(model, batch):
    (words,) = batch
    return F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


def train(run, model, optimizer, loss=loss_fn, data=None, *, batch_size=16, clip=None, steps=6):
    run.track(model=model, optimizer=optimizer)
    for batch in run.batches(texts() if data is None else data, batch_size, steps=steps):
        run.backward(loss, model, batch)
        if clip is not None:
            run.clip_grad_norm(model, clip)
        optimizer.step()
        optimizer.zero_grad()


def adamw(run, model, **options):
    return run.shard(torch.optim.AdamW(model.parameters(), lr=1e-2, **options))


def replicate(run, model, shard):
    options = {} if not shard else {"units": (Block,), **shard}
    return run.replicate(model, **options)


def tied(run, shard):
    model = replicate(run, Words(), shard)
    train(run, model, adamw(run, model, fused=True), clip=0.1)
    return model


def checkpoints(run, shard):
    model = replicate(run, Words(checkpoints=True), shard)
    train(run, model, adamw(run, model))
    return model


def frozen(run, shard):
    net = Words()
    net.blocks[0].requires_grad_(False)
    net.blocks[1].up.requires_grad_(False)
    model = replicate(run, net, shard)
    trained = [p for p in model.parameters() if p.requires_grad]
    train(run, model, run.shard(torch.optim.SGD(trained, lr=0.1, momentum=0.9, fused=True)))
    return model


def twice(run, shard):
    net = Words()
    net.order = [0, 1, 1, 2, 0]
    model = replicate(run, net, shard)
    train(run, model, adamw(run, model))
    return model


class Partly(nn.Module):
    """A unit whose second weight only some lanes use, and its third none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Parameter(torch.randn(5, 7)) for _ in range(3))

    def forward(self, x):
        y = x @ self.first.T
        return y + x @ self.second.T if int(x[0, 0] * 1000) % 2 else y


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.partly = nn.Linear(7, 7), Partly()

    def forward(self, x):
        return self.partly(self.before(x) if self.training else x)


def partly(run, shard):
    options = {**shard, "units": (Partly,)} if shard else {}
    model = run.replicate(Parts(), **options)
    data = TensorDataset(torch.randn(40, 7, generator=torch.Generator().manual_seed(1)))
    optimizer = run.shard(torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5))
    train(run, model, optimizer, lambda m, b: m(b[0]).square().mean(), data)
    return model


def pictures(run, shard):
    options = {**shard, "units": (nn.Sequential,)} if shard else {}
    net = Pictures()
    options = {**shard, "units": lambda name, _: name in {"layers.0", "layers.1"}} if shard else {}
    model = run.replicate(net, **options)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(48, 3, 8, 8, generator=generator)
    data = TensorDataset(images, torch.randint(5, (48,), generator=generator))

    def loss(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    train(run, model, adamw(run, model), loss, data, batch_size=24)
    return model


def short(run, shard):
    """The last batch of an epoch has fewer samples than lanes."""
    model = replicate(run, Words(), shard)
    train(run, model, adamw(run, model), data=texts(35), batch_size=16, steps=7)
    return model


def few(run, shard):
    """Most lanes have no samples, also the first ones."""
    model = replicate(run, Words(), shard)
    train(run, model, adamw(run, model), batch_size=3, steps=6)
    return model


def inline(run, shard):
    model = replicate(run, Words(), shard)
    optimizer = adamw(run, model)
    for batch in run.batches(texts(), 16, steps=5):
        for words in batch.lanes(model):
            batch.backward(loss_fn(model, words))
        optimizer.step()
        optimizer.zero_grad()
    return model


def accumulated(run, shard):
    """Two calls add their gradients; groups have rates of their own, and a schedule."""
    model = replicate(run, Words(), shard)
    groups = [
        {"params": [p for n, p in model.named_parameters() if "norm" in n], "weight_decay": 0.0},
        {"params": [p for n, p in model.named_parameters() if "norm" not in n], "lr": 3e-3},
    ]
    optimizer = run.shard(torch.optim.AdamW(groups, lr=1e-2))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for batch in run.batches(texts(), 16, steps=5):
        run.backward(loss_fn, model, batch)
        run.backward(lambda m, b: 0.1 * loss_fn(m, b), model, batch)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model


def two_models(run, shard):
    """One is sharded and the other is not, and a step trains both."""
    model = replicate(run, Words(), shard)
    torch.manual_seed(3)
    critic = run.replicate(nn.Linear(WORDS, 1))
    first, second = adamw(run, model), torch.optim.SGD(critic.parameters(), lr=0.1)

    def score(critic, batch):
        return critic(F.one_hot(batch[0], WORDS).float()).square().mean()

    for batch in run.batches(texts(), 16, steps=4):
        run.backward(loss_fn, model, batch)
        run.backward(score, critic, batch)
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
    return nn.ModuleList([model, critic])


def joined(run, shard):
    """One call trains a sharded and a replicated module."""
    model = replicate(run, Words(), shard)
    torch.manual_seed(3)
    scale = run.replicate(nn.Linear(1, 1))
    first, second = adamw(run, model), torch.optim.SGD(scale.parameters(), lr=0.1)
    for batch in run.batches(texts(), 16, steps=4):
        for words in batch.lanes(model, scale):
            loss = loss_fn(model, words)
            batch.backward(scale(loss.reshape(1, 1)).square().mean())
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
    return nn.ModuleList([model, scale])


def evaluated(run, shard):
    """Evaluations between updates, of blocks that not all workers have."""
    model = replicate(run, Words(), shard)
    optimizer = adamw(run, model)
    losses = []
    for batch in run.batches(texts(), 16, steps=4):
        run.backward(loss_fn, model, batch)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(run.evaluate(loss_fn, model, texts(20), 16)["loss"])
    with torch.no_grad(), run.full_parameters(model):
        model.embedding.weight[0, :4] = torch.tensor(losses)
    run.log(last=run.evaluate(loss_fn, model, texts(20), 16)["loss"])
    return model


def averaged(run, shard):
    """Two moving averages of a model, by torch and by hand, evaluated after each update."""
    model = replicate(run, Words(), shard)
    optimizer = adamw(run, model)
    mean = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    plain, twin = AveragedModel(model), copy.deepcopy(model)  # equal weights; by hand
    copy.deepcopy(model)
    gc.collect()  # a copy may end before the run
    losses = []
    for batch in run.batches(texts(), 16, steps=4):
        run.backward(loss_fn, model, batch)
        optimizer.step()
        optimizer.zero_grad()
        mean.update_parameters(model)
        plain.update_parameters(model)
        with torch.no_grad():
            for own, other in zip(twin.parameters(), model.parameters(), strict=True):
                own.mul_(0.5).sub_(0.5 * (1 - other.detach()))
        losses.append(run.evaluate(loss_fn, mean, texts(20), 16)["loss"])
        losses.append(run.evaluate(loss_fn, twin, texts(20), 16)["loss"])
    with torch.no_grad(), run.full_parameters(model):
        model.embedding.weight[0, :8] = torch.tensor(losses)
    return nn.ModuleList([model, mean.module, plain.module, twin])


def fail(*_):
    raise ValueError("planted")


def fail_in_backward(_, __, out):
    out.register_hook(fail)


def failed(run, shard):
    """Passes fail at a block on all workers, and blocks are called alone; training goes on."""
    model = replicate(run, Words(), shard)
    optimizer = adamw(run, model)
    for number, batch in enumerate(run.batches(texts(), 16, steps=8)):
        block, hook = model.blocks[1 + number % 2], None
        if number in {1, 2, 4}:
            hook = block.register_forward_pre_hook(fail)
        elif number in {5, 6}:
            hook = block.register_forward_hook(fail_in_backward)
        with suppress(ValueError):
            if number == 4:
                run.evaluate(loss_fn, model, texts(20), 16)
            run.backward(loss_fn, model, batch)
        if hook is not None:
            hook.remove()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            block(torch.zeros(1, 20, device=model.embedding.weight.device))
    return model


def scaled(run, shard):
    """A loss that is scaled. In float16, gradients overflow in the first steps."""
    model = replicate(run, Words(), shard)
    optimizer, scaler = adamw(run, model), run.grad_scaler(init_scale=2.0**24, growth_interval=2)
    run.track(model=model, optimizer=optimizer, scaler=scaler)
    for batch in run.batches(texts(), 16, steps=6):
        run.backward(lambda m, b: scaler.scale(loss_fn(m, b)), model, batch)
        scaler.unscale_(optimizer)
        run.clip_grad_norm(model, 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return model


def compiled(run, shard, backend="aot_eager"):
    """Each block is compiled, before the model is sharded."""
    net = Words()
    # dynamo looks at `.grad` of what it compiles
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")
    for number, block in enumerate(net.blocks):
        net.blocks[number] = torch.compile(block, backend=backend)
    model = replicate(run, net, shard)
    train(run, model, adamw(run, model), steps=3)
    return model


def inductor(run, shard):
    return compiled(run, shard, "inductor")


class Rows(nn.Module):
    """A unit of layers."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(a, b) for a, b in pairwise(sizes)])

    def forward(self, x):
        return self.layers(x).tanh()


def adversaries(run, shard):
    """Two sharded models, of which each loss trains one and calls both."""
    options = {**shard, "units": (Rows,)} if shard else {}
    makers = [(3, 17, 5), (5, 13, 1)]
    maker, judge = (run.replicate(nn.Sequential(Rows(*s)), **options) for s in makers)
    optimizers = [adamw(run, model) for model in (maker, judge)]
    data = TensorDataset(torch.randn(40, 3, generator=torch.Generator().manual_seed(2)))

    def make(maker, batch):
        return -judge(maker(batch[0])).mean()

    def judge_made(judge, batch):
        return judge(maker(batch[0])).mean() - judge(batch[0].repeat(1, 2)[:, :5]).mean()

    for batch in run.batches(data, 10, steps=6):
        for loss, model, optimizer in zip(
            (judge_made, make), (judge, maker), optimizers[::-1], strict=True
        ):
            run.backward(loss, model, batch)
            optimizer.step()
            optimizer.zero_grad()
    return nn.ModuleList([maker, judge])


JOBS = (
    tied, checkpoints, frozen, twice, partly, pictures, short, inline, accumulated, two_models,
    joined, evaluated, adversaries, few, averaged, failed, scaled,
)  # fmt: skip
COMPILED = (compiled, inductor)


def digest(run, model) -> str:
    """Return a hash of all parameters and buffers."""
    hasher = hashlib.sha256()
    parts = model if isinstance(model, nn.ModuleList) else [model]
    for part in parts:
        with run.full_parameters(part):
            for name, value in part.state_dict().items():
                hasher.update(name.encode() + value.cpu().numpy().tobytes())
    return hasher.hexdigest()[:16]


def digests(names, shard, lanes=8, **options) -> dict[str, str]:
    """Run jobs one after the other in this worker; return what they end with."""
    torch.set_num_threads(1)
    results = {}
    for job in JOBS if names is None else (*JOBS, *COMPILED):
        if names is None or job.__name__ in names:
            with ss.init(lanes=lanes, progress=False, system_every=None, **options) as run:
                torch.manual_seed(1)
                try:
                    results[job.__name__] = digest(run, job(run, shard))
                except Exception as error:
                    if names is not None:
                        raise
                    results[job.__name__] = repr(error)[:300]
                    raise
    return results
