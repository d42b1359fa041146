"""A variational autoencoder whose weight of the KL divergence grows."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS = 2
BATCH_SIZE = 64
WARMUP = 20


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 16))
        self.decoder = nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 64))

    def forward(self, images):
        mean, log_variance = self.encoder(images).chunk(2, 1)
        latent = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        return self.decoder(latent), mean, log_variance


def losses(images, outputs):
    decoded, mean, log_variance = outputs
    divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1).mean()
    return F.mse_loss(decoded, images, reduction="sum") / len(images), divergence


def make_data(size=1024):
    waves = torch.arange(64.0) * torch.rand(size, 1, generator=torch.Generator().manual_seed(0))
    return TensorDataset(waves.sin())


def main():
    torch.manual_seed(0)
    train_set = make_data()
    model = DistributedDataParallel(VAE())
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, BATCH_SIZE // dist.get_world_size(), sampler=sampler)
    torch.manual_seed(dist.get_rank())
    step = 0
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for (images,) in loader:
            reconstruction, divergence = losses(images, model(images))
            loss = reconstruction + min(1, step / WARMUP) * divergence
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
        means = torch.stack([reconstruction, divergence]).detach() / dist.get_world_size()
        dist.all_reduce(means)
        if dist.get_rank() == 0:
            print(
                "epoch {}: reconstruction {:.3f}, divergence {:.3f}".format(epoch, *means.tolist())
            )
            torch.save(model.module.state_dict(), "vae.pt")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
