"""The first step with Accelerate, for torchrun."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader

from benchmarks.start.network import BATCH_SIZE, dataset, network, report_step

accelerator = Accelerator(cpu=True)
plain = network()
model, optimizer, loader = accelerator.prepare(
    plain,
    torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True),
    DataLoader(dataset(), BATCH_SIZE // accelerator.num_processes, shuffle=True),
)
features, labels = next(iter(loader))
accelerator.backward(F.cross_entropy(model(features), labels))
optimizer.step()
optimizer.zero_grad()
report_step()
accelerator.wait_for_everyone()
accelerator.end_training()
