"""Contrastive learning (SimCLR) over the whole batch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn import all_gather
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

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


def main():
    torch.manual_seed(0)
    train_set = make_data()
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, BATCH_SIZE // dist.get_world_size(), sampler=sampler)
    torch.manual_seed(dist.get_rank())
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for batch in loader:
            loss = contrast(model, [torch.cat(all_gather(part)) for part in embed(model, batch)])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
            torch.save(model.module.state_dict(), "contrastive.pt")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
