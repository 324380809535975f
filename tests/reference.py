"""The algorithm of the paper written down plainly, as the oracle of the trajectory test.

It shares no code with the package: ordinary torch modules, `torch.optim.Adam`, Python lists and an explicit `if`.
The caller hands it data and the indices of every batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def flatten(tensors):
    return torch.cat([t.reshape(-1) for t in tensors])


def spread(vector, parameters):
    start = 0
    for p in parameters:
        p.grad = vector[start : start + p.numel()].view_as(p).clone()
        start += p.numel()


def kl(p, q_logits):
    """D_KL(p || q), eq. (4): expectation under p, averaged over the batch."""
    q = F.softmax(q_logits, dim=1)
    total = 0.0
    for row_p, row_q in zip(p, q, strict=True):
        for a, b in zip(row_p, row_q, strict=True):
            if a > 0:
                total = total + a * (torch.log(a) - torch.log(b))
    return total / len(p)


def train(
    models,
    pools,
    publics,
    local_indices,
    public_indices,
    rounds,
    lr=1e-3,
    weight_decay=1e-4,
    interval=1,
    use_kl=True,
    kl_weight=1.0,
    temperature=1.0,
    project="qp",
    local_gradient="sum",
    heard=None,
    replay=0,
):
    """Trains `models` in place.

    `pools[i]` and `publics[i]` are (inputs, labels); `local_indices(i, r)` and `public_indices(i, r)` give batches;
    `heard(i, r)` lists the teachers of node i (default: everybody else). `replay` is beyond the paper: that many
    lessons are kept and repeated in turn, one in each round without an exchange.
    """
    n = len(models)
    heard = heard or (lambda i, r: [j for j in range(n) if j != i])
    make = lambda m: torch.optim.Adam(m.parameters(), lr=lr, weight_decay=weight_decay, amsgrad=True)  # noqa: E731
    local_optimizers = [make(m) for m in models]
    mutual_optimizers = [make(m) for m in models]
    history = [[] for _ in range(n)]
    shelves = [[None] * min(replay, interval - 1) for _ in range(n)]

    def learn(i, lesson):
        """One mutual step of node i from (inputs, labels, posteriors, accuracy) of each teacher."""
        parameters = list(models[i].parameters())
        gradients, history[i] = history[i], []
        if local_gradient == "sum":
            g_loc = sum(gradients)
        else:
            g_loc = gradients[-1] - gradients[0] if interval > 1 else gradients[-1]
        if not lesson:
            return
        loss = 0.0
        for x, y, p, accuracy in lesson:
            logits = models[i](x)
            loss = loss + F.cross_entropy(logits, y)
            if use_kl:
                soft = p ** (1 / temperature)
                soft = soft / soft.sum(1, keepdim=True)
                loss = loss + kl_weight * accuracy * temperature**2 * kl(soft, logits / temperature)
        g_pub = flatten(torch.autograd.grad(loss / len(lesson), parameters))
        d = torch.dot(g_pub, g_loc)
        step = g_pub
        if project == "pcgrad":
            step = g_pub + g_loc
            if d < 0:
                step = (g_pub - d / g_loc.dot(g_loc) * g_loc) + (g_loc - d / g_pub.dot(g_pub) * g_pub)
        elif project == "qp" and d < 0:
            step = g_pub - d / g_loc.dot(g_loc) * g_loc
        spread(step, parameters)
        mutual_optimizers[i].step()

    exchanges = 0
    for r in range(1, rounds + 1):
        mutual_round = interval > 0 and r % interval == 0
        for i, model in enumerate(models):
            x, y = pools[i]
            idx = local_indices(i, r)
            parameters = list(model.parameters())
            loss = F.cross_entropy(model(x[idx]), y[idx])
            g = flatten(torch.autograd.grad(loss, parameters))
            history[i].append(g)
            spread(g, parameters)
            local_optimizers[i].step()
            if replay and not mutual_round and exchanges:
                back = (r % interval - 1) % min(exchanges, len(shelves[i]))
                lesson = shelves[i][(exchanges - 1 - back) % len(shelves[i])]
                if lesson:
                    learn(i, lesson)
        if not mutual_round:
            continue
        signals = []
        for i, model in enumerate(models):
            x, y = publics[i]
            idx = public_indices(i, r)
            with torch.no_grad():
                p = F.softmax(model(x[idx]), dim=1)
            signals.append((x[idx], y[idx], p, (p.argmax(1) == y[idx]).double().mean()))
        for i in range(n):
            lesson = [signals[j] for j in heard(i, r)]
            learn(i, lesson)
            if shelves[i]:
                shelves[i][exchanges % len(shelves[i])] = lesson
        exchanges += 1
