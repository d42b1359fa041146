"""A convolutional network with mixed precision, a schedule per step and validation."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

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
    return {"top1": (model(images).argmax(1) == labels).float().mean()}


def main():
    torch.manual_seed(0)
    train_set, test_set = make_data(512, 1), make_data(128, 2)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, BATCH_SIZE // dist.get_world_size(), sampler=sampler)
    test_loader = DataLoader(
        test_set, BATCH_SIZE, sampler=DistributedSampler(test_set, shuffle=False)
    )
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.1, total_steps=EPOCHS * len(loader)
    )
    scaler = torch.amp.GradScaler("cpu")
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        for images, labels in loader:
            with torch.autocast("cpu", torch.float16):
                loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scheduler.step()
        model.eval()
        top1, batches = torch.zeros(()), 0
        with torch.no_grad():
            for batch in test_loader:
                top1 += correct(model, batch)["top1"]
                batches += 1
        top1 /= batches * dist.get_world_size()
        dist.all_reduce(top1)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: top1 {top1.item():.1%}")
            torch.save(model.module.state_dict(), "imagenet.pt")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
