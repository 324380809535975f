"""A round of FedH2L in bare PyTorch, for comparison: only forward, backward and optimiser steps.

It does not import fedh2l and has no addressed sampling, messages, projection or metrics. It uses `torch.randint`
batches and `torch.optim.Adam`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

NODES, BATCH, CLASSES = 4, 32, 10


class LeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.hidden1 = nn.Linear(400, 120)
        self.hidden2 = nn.Linear(120, 84)
        self.output = nn.Linear(84, CLASSES)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2)).flatten(1)
        return self.output(F.relu(self.hidden2(F.relu(self.hidden1(x)))))


class BareLoop:
    """Four LeNets, with 1,050 local and 100 public samples each, and 400 pooled validation samples."""

    def __init__(self, device="cpu"):
        self.device = device
        self.nets = [LeNet().to(device) for _ in range(NODES)]
        options = {"lr": 1e-3, "weight_decay": 1e-4, "amsgrad": True}
        self.local = [torch.optim.Adam(net.parameters(), **options) for net in self.nets]
        self.mutual = [torch.optim.Adam(net.parameters(), **options) for net in self.nets]
        self.pools = [self._data(1050) for _ in range(NODES)]
        self.public = [self._data(100) for _ in range(NODES)]
        self.validation = self._data(400)

    def _data(self, size):
        return torch.rand(size, 1, 28, 28, device=self.device), torch.randint(CLASSES, (size,), device=self.device)

    def rounds(self, count):
        for _ in range(count):
            self.round()

    def round(self):
        for net, optimizer, (x, y) in zip(self.nets, self.local, self.pools, strict=True):
            i = torch.randint(len(x), (BATCH,), device=self.device)
            optimizer.zero_grad()
            F.cross_entropy(net(x[i]), y[i]).backward()
            optimizer.step()
        taught = []
        for net, (x, y) in zip(self.nets, self.public, strict=True):
            i = torch.randint(len(x), (BATCH,), device=self.device)
            with torch.no_grad():
                taught.append((x[i], y[i], torch.softmax(net(x[i]), 1)))
        for k, (net, optimizer) in enumerate(zip(self.nets, self.mutual, strict=True)):
            x, y, p = (torch.cat([signal[part] for j, signal in enumerate(taught) if j != k]) for part in range(3))
            optimizer.zero_grad()
            log_p = torch.log_softmax(net(x), 1)
            (F.nll_loss(log_p, y) + F.kl_div(log_p, p, reduction="batchmean")).backward()
            optimizer.step()

    @torch.no_grad()
    def evaluate(self):
        x, y = self.validation
        return [int((net(x).argmax(1) == y).sum()) for net in self.nets]
