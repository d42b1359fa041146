"""A classifier, as in the tutorial of DistributedDataParallel."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep as ss

EPOCHS = 2
BATCH_SIZE = 64


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(64, 256)
        self.net2 = nn.Linear(256, 8)

    def forward(self, images):
        return self.net2(F.relu(self.net1(images.flatten(1))))


def make_data(size=1024):
    images = torch.randn(size, 8, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(images, images.mean(2).argmax(1))


def main(run):
    train_set = make_data()
    model = run.replicate(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for batch in run.batches(train_set, BATCH_SIZE, epochs=EPOCHS):
        optimizer.zero_grad()
        for images, labels in batch.lanes(model):
            outputs = model(images)
            loss = F.cross_entropy(outputs, labels)
            batch.backward(loss)
        optimizer.step()
        run.log(batch.means)


if __name__ == "__main__":
    with ss.init(lanes=4, dir="runs/tutorial") as run:
        main(run)
