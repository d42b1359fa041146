"""Segmentation with ignored pixels, and the intersection over union (IoU) of a class."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

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


def main():
    torch.manual_seed(0)
    train_set = make_data()
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, BATCH_SIZE // dist.get_world_size(), sampler=sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for images, masks in loader:
            logits = model(images)
            loss = F.cross_entropy(logits, masks, ignore_index=IGNORED)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            intersection, union = overlap(logits, masks)
            pixels = torch.stack([intersection.sum(), union.sum()])
            dist.all_reduce(pixels)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: IoU {(pixels[0] / pixels[1]).item():.3f}")
            torch.save(model.module.state_dict(), "segmentation.pt")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
