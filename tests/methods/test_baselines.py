"""The baselines against plain transcriptions of their sources: torch's own optimisers and losses, nothing of ours.

Some sources are code and not papers, as `docs/methods.md` says, and FedMD is compared without its transfer phase.
Parameters agree to the float32 of the messages (1e-6 where rounding is copied, 2e-5 where AMSGrad sees it).
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedh2l.runs.trainer import Trainer

POOL = "private+own-public"
DEEP = [f"nodes.{i}.model_args.hidden=[12,9]" for i in range(4)]


def start(federation, method: str, *changes: str) -> Trainer:
    return Trainer(federation("run.dtype=float64", "run.rounds=200", f"method.name={method}", *changes))


def flat(module: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


@torch.no_grad()
def put(module: nn.Module, vector: torch.Tensor) -> None:
    nn.utils.vector_to_parameters(vector.clone(), module.parameters())


def amsgrad(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), lr=1e-3, weight_decay=1e-4, amsgrad=True)


def step(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def sent(values: torch.Tensor) -> torch.Tensor:
    """What is left of values when they have crossed as float32."""
    return values.detach().float().double()


def distil(teacher: torch.Tensor, student: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    target = F.softmax(teacher.detach() / temperature, 1)
    return temperature**2 * F.kl_div(F.log_softmax(student / temperature, 1), target, reduction="batchmean")


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=2e-5)


def simplex(values: torch.Tensor) -> torch.Tensor:
    """By bisection on the shift, unlike the sorting of the source."""
    low, high = float(values.min()) - 1, float(values.max())
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if (values - middle).clamp_min(0).sum() > 1 else (low, middle)
    return (values - low).clamp_min(0)


def test_agnostic_every_step(federation):
    trainer = start(federation, "agnostic", "method.lambda_lr=0.3")
    nodes = trainer.engine.learners
    model = copy.deepcopy(nodes[0].module)
    optimizer, mixture, iterates = amsgrad(model), torch.full((4,), 0.25, dtype=torch.float64), []
    for round in range(1, 13):
        batches = [node.local_batch(round, POOL) for node in nodes]
        losses = torch.stack([F.cross_entropy(model(b.inputs), b.labels) for b in batches])
        step(optimizer, (mixture * losses).sum())
        mixture = simplex(mixture + 0.3 * losses.detach())
        iterates.append(flat(model))
    trainer.engine.advance(1, 12, lambda _: True)
    assert mixture.max() > 0.3  # it did move
    close(trainer.engine.router.server.memory["weights"], mixture)
    for node in nodes:
        close(node.parameters, flat(model))
    put(model, torch.stack(iterates).mean(0))
    inputs = nodes[0].private.inputs
    close(trainer.engine.method.views(nodes[0])["mean"](inputs), model(inputs).detach())


def test_agnostic_in_local_steps(federation):
    trainer = start(federation, "agnostic", "method.interval=3")
    nodes = trainer.engine.learners
    models = [copy.deepcopy(nodes[0].module) for _ in nodes]
    optimizers, mixture = [amsgrad(m) for m in models], torch.full((4,), 0.25, dtype=torch.float64)
    for exchange in range(3):
        at_start = []
        for node, model, optimizer in zip(nodes, models, optimizers, strict=True):
            for local in range(3):
                batch = node.local_batch(3 * exchange + local + 1, POOL)
                loss = F.cross_entropy(model(batch.inputs), batch.labels)
                if local == 0:
                    at_start.append(loss.detach())
                step(optimizer, loss)
        average = sum(w * flat(m) for w, m in zip(mixture, models, strict=True))
        mixture = mixture * torch.exp(0.1 * torch.stack(at_start))
        mixture /= mixture.sum()
        for model in models:
            put(model, average)
    trainer.engine.advance(1, 9, lambda _: True)
    close(trainer.engine.router.server.memory["weights"], mixture)
    close(nodes[2].parameters, average)


def test_fedprox(federation):
    trainer = start(federation, "fedprox", "method.mu=0.7", "method.interval=4")
    nodes = trainer.engine.learners
    models = [copy.deepcopy(nodes[0].module) for _ in nodes]
    optimizers, anchor = [amsgrad(m) for m in models], flat(nodes[0].module)
    for exchange in range(3):
        for node, model, optimizer in zip(nodes, models, optimizers, strict=True):
            for local in range(4):
                batch = node.local_batch(4 * exchange + local + 1, POOL)
                distance = torch.cat([p.reshape(-1) for p in model.parameters()]) - anchor
                step(optimizer, F.cross_entropy(model(batch.inputs), batch.labels) + 0.35 * (distance**2).sum())
        anchor = sum(flat(m) for m in models) / 4
        for model in models:
            put(model, anchor)
    trainer.engine.advance(1, 12, lambda _: True)
    close(nodes[1].parameters, anchor)


@pytest.mark.parametrize("state", ["persistent", "reset"])
def test_fml(federation, state):
    changes = ["method.interval=4", "method.alpha=0.3", "method.beta=0.8", f"method.meme_state={state}"]
    trainer = start(federation, "fml", *changes)
    nodes = trainer.engine.learners
    own = [copy.deepcopy(node.module) for node in nodes]
    memes = [copy.deepcopy(nodes[0].module) for _ in nodes]
    own_optimizers, meme_optimizers = [amsgrad(m) for m in own], [amsgrad(m) for m in memes]
    for round in range(1, 11):
        for k, node in enumerate(nodes):
            batch = node.local_batch(round, POOL)
            f, g = own[k](batch.inputs), memes[k](batch.inputs)
            own_loss = 0.3 * F.cross_entropy(f, batch.labels) + 0.7 * distil(g, f)
            meme_loss = 0.8 * F.cross_entropy(g, batch.labels) + 0.2 * distil(f, g)
            step(own_optimizers[k], own_loss)
            step(meme_optimizers[k], meme_loss)
        if round % 4 == 0:
            common = sum(flat(m) for m in memes) / 4
            for k, meme in enumerate(memes):
                put(meme, common)
                if state == "reset":
                    meme_optimizers[k] = amsgrad(meme)
    trainer.engine.advance(1, 10, lambda _: True)
    for node, model, meme in zip(nodes, own, memes, strict=True):
        close(node.parameters, flat(model))
        close(node.networks["meme"].parameters, flat(meme))
    put(memes[0], common)  # what is tested beside the nodes' models is the meme after the last exchange
    inputs = nodes[3].private.inputs
    close(trainer.engine.method.views(nodes[3])["meme"](inputs), memes[0](inputs).detach())


def test_fedmd(federation):
    phases = ["method.public_epochs=0", "method.private_epochs=0", "method.revisit_epochs=1"]
    trainer = start(federation, "fedmd", *phases, "method.digest_epochs=2", "method.digest_batch_size=32")
    nodes, revisit = trainer.engine.learners, trainer.engine.method._schedule.revisit
    models = [copy.deepcopy(node.module) for node in nodes]
    local, digest = [amsgrad(m) for m in models], [amsgrad(m) for m in models]
    public = nodes[0].seed_set.union
    last = 2 * revisit + 3
    for round in range(1, last + 1):
        for k, node in enumerate(nodes):
            batch = node.local_batch(round, "private")
            step(local[k], F.cross_entropy(models[k](batch.inputs), batch.labels))
        if round % revisit == 0:
            consensus = sent(sum(sent(m(public.inputs)) for m in models) / 4)
            for k, node in enumerate(nodes):
                order = node.order("digest", round, len(public))
                for part in [*torch.split(order, 32)] * 2:
                    step(digest[k], F.l1_loss(models[k](public.inputs[part]), consensus[part]))
    trainer.engine.advance(1, last, lambda _: True)
    for node, model in zip(nodes, models, strict=True):
        close(node.parameters, flat(model))


@pytest.mark.parametrize("server_distils", [True, False])
def test_fedgkt(federation, server_distils):
    changes = ["method.interval=4", "method.server_epochs=2", "method.server_batch_size=64", "method.alpha=0.6"]
    trainer = start(federation, "fedgkt", *changes, f"method.server_distillation={str(server_distils).lower()}", *DEEP)
    engine = trainer.engine
    nodes = engine.learners
    models = [copy.deepcopy(node.module) for node in nodes]
    trunk = copy.deepcopy(models[0].trunk)
    edges = [amsgrad(nn.ModuleList([m.stem, m.head])) for m in models]
    server, taught = amsgrad(trunk), None
    for round in range(1, 11):
        for k, node in enumerate(nodes):
            places = node.local_indices(round, POOL)
            batch = node.pool(POOL).take(places)
            said = models[k].head(models[k].stem(batch.inputs))
            loss = F.cross_entropy(said, batch.labels)
            step(edges[k], loss if taught is None else loss + 0.6 * distil(taught[k][places], said, 3.0))
        if round % 4 == 0:
            inside = [sent(m.stem(node.pool(POOL).inputs)) for m, node in zip(models, nodes, strict=True)]
            says = [sent(m.head(h)) for m, h in zip(models, inside, strict=True)]
            for epoch in range(2):
                for k, node in enumerate(nodes):
                    order = engine.router.server.order(f"{node.name}/{epoch}", round, len(inside[k]))
                    for part in torch.split(order, 64):
                        answer = trunk(inside[k][part])
                        loss = F.cross_entropy(answer, node.pool(POOL).labels[part])
                        step(server, loss + distil(says[k][part], answer, 3.0) if server_distils else loss)
            taught = [sent(trunk(h)) for h in inside]
    engine.advance(1, 10, lambda _: True)
    engine.complete(count=False)
    for node, model in zip(nodes, models, strict=True):
        close(flat(node.module.stem), flat(model.stem))
        close(flat(node.module.head), flat(model.head))
        close(flat(node.module.trunk), flat(trunk))  # as it is deployed
        inputs = node.private.inputs
        close(engine.method.views(node)["edge"](inputs), model.head(model.stem(inputs)).detach())
