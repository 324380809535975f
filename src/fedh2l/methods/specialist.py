"""A second network on a node, which learns from local data alone and has a share in what the node says."""

from __future__ import annotations

import torch
from torch import Tensor

from fedh2l.domain import Samples
from fedh2l.learner import Learner
from fedh2l.losses import cross_entropy

SPECIALIST = "specialist"
"""What the network is called beside the node's model."""
AVERAGE, COUNT = "average of the specialist", "weights in the specialist's average"
"""Under which a node remembers the average of its weights, if that is what teaches."""


def equip(node: Learner) -> None:
    """It starts as the node's model does."""
    node.further(SPECIALIST, node.module)


def train(node: Learner, batch: Samples, round: int, averaged: bool) -> None:
    """A step on a local batch; with `averaged`, the average of its weights follows."""
    network = node.networks[SPECIALIST]
    loss = cross_entropy(network.logits(batch.inputs), batch.labels)
    node.record(round, specialist_loss=loss)
    network.step(network.gradient(loss), "local")
    if averaged:
        node.follow(network.shared(), AVERAGE, COUNT)


def posteriors(node: Learner, inputs: Tensor, averaged: bool) -> Tensor:
    """What its weights of now say of inputs, or the average of them, `(rows, classes)`."""
    network = node.networks[SPECIALIST]
    logits = network.predict_as(node.memory[AVERAGE], inputs) if averaged else network.predict(inputs)
    return torch.softmax(logits, -1)
