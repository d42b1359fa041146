"""Contrastive learning (SimCLR) over the whole batch."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep as ss

EPOCHS = 2
BATCH_SIZE = 64


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))


def embed(model, batch):
    (images,) = batch
    views = [images + 0.5 * torch.randn_like(images) for _ in range(2)]
    return tuple(F.normalize(model(view), dim=1) for view in views)


def contrast(_, embeddings):
    first, second = embeddings
    similarities = first @ second.T / 0.1
    return F.cross_entropy(similarities, torch.arange(len(first)))


def make_data(size=1024):
    return TensorDataset(torch.randn(size, 64, generator=torch.Generator().manual_seed(0)))


def main(run):
    train_set = make_data()
    model = run.replicate(Net())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    run.track(model=model, optimizer=optimizer)
    for batch in run.batches(train_set, BATCH_SIZE, epochs=EPOCHS):
        means = run.backward(contrast, model, batch, embed=embed)
        optimizer.step()
        optimizer.zero_grad()
        run.log(means)


if __name__ == "__main__":
    with ss.init(lanes=4, dir="runs/contrastive") as run:
        main(run)
