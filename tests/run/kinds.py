"""Training jobs of many kinds, with their difficult cases."""

from __future__ import annotations

import random
from itertools import count

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LinearLR, ReduceLROnPlateau, SequentialLR, StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.jobs import Net, classify, fit, images


class Sentences(torch.utils.data.Dataset):
    """Sentences of `fewest` to 6 words."""

    def __init__(self, fewest):
        generator = torch.Generator().manual_seed(7)
        self.lengths = torch.randint(fewest, 7, (101,), generator=generator).tolist()
        self.sentences = [
            torch.randint(20, (length,), generator=generator) for length in self.lengths
        ]

    def __getitem__(self, index):
        return self.sentences[index]

    def __len__(self):
        return len(self.sentences)


class Augmented(torch.utils.data.Dataset):
    """Images that are augmented with every global random generator."""

    def __init__(self):
        self.images = images(37)

    def __getitem__(self, index):
        picture, label = self.images[index]
        noise = np.random.standard_normal(picture.shape).astype(np.float32)
        return random.uniform(0.5, 1.0) * picture + torch.from_numpy(noise) * torch.rand(()), label

    def __len__(self):
        return len(self.images)


def augmented_job(run, loader_workers):
    model = run.replicate(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return fit(run, model, optimizer, Augmented(), batch_size=16, loader_workers=loader_workers)


class Rotated(torch.utils.data.Dataset):
    """Images that are augmented with a generator of their own."""

    def __init__(self):
        self.images, self.rng = images(37), np.random.default_rng()

    def __getitem__(self, index):
        picture, label = self.images[index]
        return torch.rot90(picture, int(self.rng.integers(4)), (1, 2)), label

    def __len__(self):
        return len(self.images)


def private_generators_job(run, loader_workers=0):
    """Data and loss draw from generators that only the script knows."""
    noise = torch.Generator()
    run.on_lane_seed(noise.manual_seed)

    def loss_fn(model, batch):
        pictures, labels = batch
        pictures = pictures + torch.randn(pictures.shape, generator=noise)
        return F.cross_entropy(model(pictures), labels)

    model, data = run.replicate(Net()), Rotated()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    options = {"loss_fn": loss_fn, "loader_workers": loader_workers}
    return fit(run, model, optimizer, data, batch_size=16, **options)


class ViT(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.position = nn.Parameter(torch.randn(1, 16, width) * 0.02)
        self.blocks = nn.Sequential(*(self.block(width) for _ in range(2)))
        self.head = nn.Linear(width, 10)

    @staticmethod
    def block(width):
        return nn.TransformerEncoderLayer(
            width, 4, 2 * width, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
        )

    def forward(self, pictures):
        patches = self.patches(pictures).flatten(2).mT + self.position  # [batch, 16, width]
        return self.head(self.blocks(patches).mean(1))


def mixup(model, batch):
    pictures, labels = batch
    share, order = random.betavariate(0.8, 0.8), torch.randperm(len(labels))
    logits = model(share * pictures + (1 - share) * pictures[order])
    return share * F.cross_entropy(logits, labels) + (1 - share) * F.cross_entropy(
        logits, labels[order]
    ), {"share": share}


def vit_job(*, sharded):
    def job(run):
        model = run.replicate(ViT())
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
        others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=3e-3, fused=True)
        if sharded:
            optimizer = run.shard(optimizer)
        schedule = SequentialLR(
            optimizer,
            [LinearLR(optimizer, 0.1, total_iters=3), StepLR(optimizer, 2)],
            milestones=[3],
        )

        def after_step(_):
            schedule.step()
            averaged.update_parameters(model)

        tracked = {"averaged": averaged, "schedule": schedule}
        return fit(
            run,
            model,
            optimizer,
            images(75),
            loss_fn=mixup,
            max_norm=0.5,
            tracked=tracked,
            after_step=after_step,
        )

    return job


class Contrastive(nn.Module):
    """An encoder, and a predictor and a temperature that only the loss uses."""

    def __init__(self):
        super().__init__()
        self.encoder = Net().features
        self.project = nn.Linear(36, 16)
        self.predictor = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.1))
        self.temperature = nn.Parameter(torch.tensor(1.0))


def two_views(model, batch):
    pictures, labels = batch
    views = [pictures + 0.1 * torch.randn_like(pictures) for _ in range(2)]
    first, second = (F.normalize(model.project(model.encoder(view)), dim=1) for view in views)
    return {"one": first, "two": second, "labels": labels}


def contrast(model, embeddings):
    first, second = model.predictor(embeddings["one"]), embeddings["two"]
    logits = model.temperature.exp() * first @ second.T  # [batch, batch]
    targets = torch.arange(len(logits))
    same = embeddings["labels"][:, None] == embeddings["labels"]
    loss = F.cross_entropy(logits, targets) + 0.1 * logits[~same].square().mean()
    return loss, {"accuracy": (logits.argmax(1) == targets).float().mean()}


def contrastive_job(*, sharded):
    def job(run):
        model = run.replicate(Contrastive())
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        if sharded:
            optimizer = run.shard(optimizer)
        # The last batch of an epoch has fewer samples than lanes.
        return fit(
            run, model, optimizer, images(101), loss_fn=contrast, embed=two_views, max_norm=0.5
        )

    return job


def three_samples_job(run):
    model = run.replicate(Net())
    optimizer = run.shard(torch.optim.Adam(model.parameters()))
    return fit(run, model, optimizer, images(3), batch_size=32, epochs=3)


def adversarial_job(run):
    generator = run.replicate(
        nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 64))
    )
    critic = run.replicate(
        nn.Sequential(nn.Linear(64, 16), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(16, 1))
    )
    making = run.shard(torch.optim.Adam(generator.parameters(), betas=(0.5, 0.9)))
    judging = torch.optim.RMSprop(critic.parameters())
    models = nn.ModuleDict({"generator": generator, "critic": critic})
    run.track(generator=generator, critic=critic, making=making, judging=judging)

    def judge(models, batch):
        made = models["generator"](torch.randn(4, 5))
        return (
            F.softplus(models["critic"](made)).mean()
            + F.softplus(-models["critic"](batch[0].flatten(1))).mean()
        )

    def make(models, batch):
        return F.softplus(-models["critic"](models["generator"](torch.randn(4, 5)))).mean()

    for batch in run.batches(images(53), 24, epochs=2):
        judged = run.backward(judge, models, batch, update=critic)
        judging.step()
        critic.requires_grad_(requires_grad=False)
        made = run.backward(make, models, batch, update=generator)
        critic.requires_grad_(requires_grad=True)
        making.step()
        judging.zero_grad()
        making.zero_grad()
        run.log(judging=judged["loss"], making=made["loss"])
    return {"generator": generator, "critic": critic, "making": making, "judging": judging}


class Experts(nn.Module):
    """Parameters that are frozen, or used by all lanes, by some lanes, at some steps, or never."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(64, 8).requires_grad_(requires_grad=False)
        self.always, self.by_lane, self.by_step = (nn.Linear(8, 10) for _ in range(3))
        self.add_module("never", nn.Linear(8, 10))


def experts_job(run):
    model = run.replicate(Experts())

    def loss_fn(model, batch):
        pictures, labels = batch
        features = model.frozen(pictures.flatten(1))
        logits = model.always(features)
        by_lane = bool(labels[0] < 2)
        if by_lane:
            logits = logits + model.by_lane(features)
        if run.step % 2:
            logits = logits + model.by_step(features)
        return F.cross_entropy(logits, labels), {"by_lane": by_lane}

    optimizer = run.shard(torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1))
    return fit(run, model, optimizer, images(101), loss_fn=loss_fn)


class Watching(nn.Module):
    """Buffers of every kind: counters, averages, choices, constants, and nonpersistent ones."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("found", torch.zeros(10, dtype=torch.bool))
        self.register_buffer("mean", torch.zeros(64, dtype=torch.float64))
        self.register_buffer("highest", torch.full((64,), -torch.inf))
        self.register_buffer("mask", torch.full((10, 10), -torch.inf).triu(1))
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def forward(self, pictures):
        flat = pictures.flatten(1)
        if self.training:
            self.seen += len(flat)
            self.found[int(self.seen) % 10] = True
            self.mean = 0.9 * self.mean + 0.1 * flat.detach().double().mean(0)
            torch.maximum(self.highest, flat.detach().amax(0), out=self.highest)
            self.scale.mul_(1 + flat.detach().mean())
        attention = (flat[:, :10, None] * flat[:, None, :10] + self.mask).softmax(-1).mean(1)
        return self.layer(flat - self.mean.float() + 0.01 * self.highest) * self.scale + attention


def buffers_job(run):
    rules = {"seen": "sum", "found": "max", "highest": "max", "[ms][ec]a*": "mean"}
    model = run.replicate(Watching(), buffers=rules)
    optimizer = torch.optim.Adagrad(model.parameters())
    return fit(run, model, optimizer, images(53), batch_size=16)


def words_job(run):
    """Predict the next word; the mean of a lane is over its words, and some lanes have none."""

    def loss_fn(model, sentences):
        logits = model(sentences[:, :-1].clamp(min=0))
        return F.cross_entropy(logits.flatten(0, 1), sentences[:, 1:].flatten(), ignore_index=-1)

    def collate(sentences):
        return pad_sequence(
            [F.pad(words, (1, 0)) for words in sentences], batch_first=True, padding_value=-1
        )

    def count(sentences):
        return (sentences[:, 1:] >= 0).sum()

    model = run.replicate(nn.Sequential(nn.Embedding(20, 12), nn.Dropout(0.1), nn.Linear(12, 20)))
    optimizer = run.shard(torch.optim.NAdam(model.parameters()))
    return fit(
        run,
        model,
        optimizer,
        Sentences(fewest=0),
        loss_fn=loss_fn,
        batch_size=12,
        count=count,
        collate_fn=collate,
    )


def grouped_job(run):
    """Batch sentences of equal length together."""

    def loss_fn(model, sentences):
        return F.cross_entropy(
            model[sentences.shape[1] - 1](sentences.float()), sentences.sum(1) % 5
        )

    sentences = Sentences(fewest=1)
    model = run.replicate(nn.ModuleList(nn.Linear(length, 5) for length in range(1, 7)))
    optimizer = run.shard(torch.optim.Adamax(model.parameters()))
    return fit(
        run, model, optimizer, sentences, loss_fn=loss_fn, batch_size=20, group_by=sentences.lengths
    )


def accumulating_job(run):
    """Add up the gradients of two losses, and of two steps."""
    model = run.replicate(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
    optimizer = run.shard(torch.optim.Adadelta(model.parameters()))
    schedule = ReduceLROnPlateau(optimizer, patience=0)
    tracked = {"model": model, "optimizer": optimizer, "schedule": schedule}
    run.track(**tracked)
    for batch in run.batches(images(75), 16, epochs=2):
        means = run.backward(classify, model, batch)
        penalty = run.backward(lambda model, _: model[1].weight.square().mean(), model, batch)
        run.log(means, penalty=penalty["loss"], norm=run.clip_grad_norm(model, 2.0))
        if run.step % 2:
            optimizer.step()
            optimizer.zero_grad()
            schedule.step(means["loss"])
    return tracked


class Walk:
    """An endless source with state."""

    def __init__(self, lane):
        self.position = torch.full((3,), float(lane))

    def __iter__(self):
        while True:
            self.position = self.position + torch.randn(3)
            yield self.position.repeat(2, 1)

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def noise(lane):
    """Yield endlessly, without state; lanes have different numbers of samples."""
    while True:
        yield torch.rand(lane + 1, 3)


def shards(lane):
    """Yield batches of two points of a lane's shards, pass by pass, without state."""
    for number in count():
        points = [torch.tensor([lane, number, point]) / 4 for point in range(lane % 3 + 2)]
        for start in range(0, len(points), 2):
            yield torch.stack(points[start : start + 2])


def streams_job(run, hook=lambda step: None):
    model = run.replicate(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)))
    optimizer = run.shard(torch.optim.Rprop(model.parameters()))
    run.track(model=model, optimizer=optimizer)
    for steps, make_stream in ((2, Walk), (3, shards), (None, noise)):  # the last one is endless
        for batch in run.streams(make_stream, steps=steps, name=make_stream.__name__):
            if run.step == 8:
                break
            run.log(
                run.backward(
                    lambda model, points: (model(points) - points).square().mean(), model, batch
                )
            )
            optimizer.step()
            optimizer.zero_grad()
            hook(run.step)
    return {"model": model, "optimizer": optimizer}


class Mixed(nn.Module):
    """Parameters and buffers of three dtypes."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(64, 65, dtype=torch.bfloat16), nn.BatchNorm1d(65)
        self.second = nn.Linear(65, 10, dtype=torch.float64)

    def forward(self, pictures):
        features = self.first(pictures.flatten(1).bfloat16())
        # BatchNorm rejects batches of one sample in training.
        features = self.norm(features.float()) if len(pictures) > 1 else features.float()
        return self.second(features.relu().double()).float()


def mixed_dtypes_job(run):
    model = run.replicate(Mixed())
    optimizer = run.shard(torch.optim.AdamW(model.parameters()))
    return fit(run, model, optimizer, images(101), max_norm=1.0)


def float64_job(run):
    model = run.replicate(Net().double())
    optimizer = run.shard(torch.optim.RAdam(model.parameters()))
    return fit(
        run,
        model,
        optimizer,
        images(101),
        loss_fn=lambda model, batch: classify(model, (batch[0].double(), batch[1])),
    )


def compiled_job(backend):
    def job(run):
        model = nn.Sequential(
            nn.Flatten(),
            nn.Linear(64, 24),
            nn.BatchNorm1d(24),
            nn.GELU(),
            nn.Dropout(0.1),
            nn.Linear(24, 10),
        )
        model = run.replicate(torch.compile(model, backend=backend))
        optimizer = run.shard(torch.optim.ASGD(model.parameters()))
        return fit(run, model, optimizer, images(32), batch_size=16)

    return job
