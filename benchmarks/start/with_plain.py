"""The first step in one process, for `python`: the lower bound."""

import torch
import torch.nn.functional as F

from benchmarks.start.network import BATCH_SIZE, dataset, network, report_step

torch.set_num_threads(1)
model = network()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
features, labels = next(iter(torch.utils.data.DataLoader(dataset(), BATCH_SIZE, shuffle=True)))
F.cross_entropy(model(features), labels).backward()
optimizer.step()
optimizer.zero_grad()
report_step()
