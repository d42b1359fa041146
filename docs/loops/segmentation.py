"""Segmentation with ignored pixels, and the intersection over union (IoU) of a class."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep as ss

EPOCHS = 2
BATCH_SIZE = 32
IGNORED = 255


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 2, 3, padding=1),
        )


def make_data(size=256):
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(size, 1, 16, 16, generator=generator)
    masks = (F.avg_pool2d(images, 3, 1, 1)[:, 0] > 0).long()
    masks[torch.rand(masks.shape, generator=generator) < 0.1] = IGNORED
    return TensorDataset(images, masks)


def overlap(logits, masks):
    """Return whether each pixel that is not ignored is in the intersection, and in the union."""
    valid = masks != IGNORED
    predicted, true = logits.argmax(1)[valid] == 1, masks[valid] == 1
    return predicted & true, predicted | true


def main(run):
    train_set = make_data()
    model = run.replicate(Net())
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    run.track(model=model, optimizer=optimizer)
    for batch in run.batches(train_set, BATCH_SIZE, epochs=EPOCHS):
        for images, masks in batch.lanes(model, count=lambda batch: (batch[1] != IGNORED).sum()):
            logits = model(images)
            loss = F.cross_entropy(logits, masks, ignore_index=IGNORED)
            intersection, union = overlap(logits, masks)
            batch.backward(loss, intersection=intersection, union=union)
        optimizer.step()
        optimizer.zero_grad()
        run.log(batch.means, iou=batch.means["intersection"] / batch.means["union"])


if __name__ == "__main__":
    with ss.init(lanes=4, dir="runs/segmentation") as run:
        main(run)
