"""A convolutional network with mixed precision, a schedule per step and validation."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep as ss

EPOCHS = 2
BATCH_SIZE = 64


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(512, 4),
        )


def make_data(size, seed):
    images = torch.randn(size, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(images, images.mean(1).unfold(1, 4, 4).mean((2, 3)).argmax(1))


def correct(model, batch):
    images, labels = batch
    return {"top1": model(images).argmax(1) == labels}


def main(run):
    train_set, test_set = make_data(512, 1), make_data(128, 2)
    model = run.replicate(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loop = run.batches(train_set, BATCH_SIZE, epochs=EPOCHS)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=loop.steps)
    scaler = run.grad_scaler()
    run.track(model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler)
    for batch in loop:
        for images, labels in batch.lanes(model):
            loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
            batch.backward(scaler.scale(loss), loss=loss)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scheduler.step()
        run.log(batch.means)
        if loop.step % loop.steps_per_epoch == 0:
            run.log(run.evaluate(correct, model, test_set, BATCH_SIZE))


if __name__ == "__main__":
    with ss.init(lanes=4, dir="runs/imagenet", precision="float16") as run:
        main(run)
