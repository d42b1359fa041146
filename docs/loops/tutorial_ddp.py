"""A classifier, as in the tutorial of DistributedDataParallel."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

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


def main():
    torch.manual_seed(0)
    train_set = make_data()
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, BATCH_SIZE // dist.get_world_size(), sampler=sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            outputs = model(images)
            loss = F.cross_entropy(outputs, labels)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
            torch.save(model.module.state_dict(), "tutorial.pt")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
