"""The first step with DistributedDataParallel, for torchrun."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.start.network import BATCH_SIZE, dataset, network, report_step

dist.init_process_group("gloo")
model = DistributedDataParallel(network())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
data = dataset()
loader = DataLoader(data, BATCH_SIZE // dist.get_world_size(), sampler=DistributedSampler(data))
features, labels = next(iter(loader))
F.cross_entropy(model(features), labels).backward()
optimizer.step()
optimizer.zero_grad()
report_step()
dist.barrier()
dist.destroy_process_group()
