"""Distillation from a frozen teacher, and a moving average (EMA) of the student."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import samestep as ss

EPOCHS = 2
BATCH_SIZE = 64


def make_net(width):
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def distance(student, teacher, labels):
    soft = F.kl_div((student / 2).log_softmax(1), (teacher / 2).softmax(1), reduction="batchmean")
    return 0.5 * F.cross_entropy(student, labels) + 0.5 * 4 * soft


def make_data(size=1024):
    images = torch.randn(size, 64, generator=torch.Generator().manual_seed(0))
    return TensorDataset(images, images[:, :10].argmax(1))


def main(run):
    train_set = make_data()
    teacher = run.replicate(make_net(256).requires_grad_(requires_grad=False).eval())
    model = run.replicate(make_net(64))
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    run.track(model=model, ema=ema, optimizer=optimizer)
    for batch in run.batches(train_set, BATCH_SIZE, epochs=EPOCHS):
        for images, labels in batch.lanes(model):
            loss = distance(model(images), teacher(images), labels)
            batch.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        ema.update_parameters(model)
        run.log(batch.means)


if __name__ == "__main__":
    with ss.init(lanes=4, dir="runs/distillation") as run:
        main(run)
