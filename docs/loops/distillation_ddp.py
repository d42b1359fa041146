"""Distillation from a frozen teacher, and a moving average (EMA) of the student."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS = 2
BATCH_SIZE = 64


def make_net(width):
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def distance(student, teacher, labels):
    soft = F.kl_div((student / 2).log_softmax(1), (teacher / 2).softmax(1), reduction="batchmean")
    return 0.5 * F.cross_entropy(student, labels) + 0.5 * 4 * soft


def make_data(size=1024):
    images = torch.randn(size, 64, generator=torch.Generator().manual_seed(0))
    return TensorDataset(images, images[:, :10].argmax(1))


def main():
    torch.manual_seed(0)
    train_set = make_data()
    teacher = make_net(256).requires_grad_(requires_grad=False).eval()
    model = DistributedDataParallel(make_net(64))
    ema = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, BATCH_SIZE // dist.get_world_size(), sampler=sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = distance(model(images), teacher(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            ema.update_parameters(model.module)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
            torch.save(ema.module.state_dict(), "distillation.pt")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
