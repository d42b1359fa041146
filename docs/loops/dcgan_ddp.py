"""A DCGAN: a generator and a discriminator with an optimizer each."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS = 2
BATCH_SIZE = 64


def make_generator():
    return nn.Sequential(
        nn.ConvTranspose2d(16, 32, 4),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.ConvTranspose2d(32, 1, 4, stride=2, padding=1),
        nn.Tanh(),
    )


def make_discriminator():
    return nn.Sequential(
        nn.Conv2d(1, 32, 4, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.LeakyReLU(0.2),
        nn.Conv2d(32, 1, 4),
        nn.Flatten(0),
    )


def make_data(size=512):
    waves = torch.arange(8.0) + torch.rand(size, 1, 1, generator=torch.Generator().manual_seed(0))
    return TensorDataset(waves.sin()[:, None].expand(-1, 1, 8, 8).contiguous())


def main():
    torch.manual_seed(0)
    train_set = make_data()
    generator = DistributedDataParallel(make_generator())
    discriminator = DistributedDataParallel(make_discriminator())
    optimizer_g = torch.optim.Adam(generator.parameters(), 2e-4, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(discriminator.parameters(), 2e-4, betas=(0.5, 0.999))
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, BATCH_SIZE // dist.get_world_size(), sampler=sampler)
    torch.manual_seed(dist.get_rank())
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for (real,) in loader:
            fake = generator(torch.randn(len(real), 16, 1, 1))
            logits = discriminator(torch.cat([real, fake.detach()]))
            loss_d = (
                F.softplus(-logits[: len(real)]).mean() + F.softplus(logits[len(real) :]).mean()
            )
            loss_d.backward()
            optimizer_d.step()
            optimizer_d.zero_grad()
            loss_g = F.softplus(-discriminator(fake)).mean()
            loss_g.backward()
            optimizer_g.step()
            optimizer_g.zero_grad()
            optimizer_d.zero_grad()
        if dist.get_rank() == 0:
            print(
                f"epoch {epoch}: discriminator {loss_d.item():.4f}, generator {loss_g.item():.4f}"
            )
            torch.save(generator.module.state_dict(), "dcgan.pt")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
