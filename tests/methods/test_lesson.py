from __future__ import annotations

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from fedh2l.data.domain import Samples
from fedh2l.methods.lesson import Lesson, mutual_losses
from fedh2l.protocol.messages import Posteriors
from fedh2l.protocol.messages.base import correct_count
from fedh2l.training.losses import cross_entropy, distillation, kl_rows


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_cross_entropy_is_torchs():
    logits, labels = randn(6, 4), torch.tensor([0, 1, 2, 3, 3, 0])
    torch.testing.assert_close(cross_entropy(logits, labels), F.cross_entropy(logits, labels))


def test_kl_is_teacher_first_and_summed_over_classes():
    teacher, log_p = torch.softmax(randn(2, 5, 4)[0], -1), torch.log_softmax(randn(2, 5, 4)[1], -1)
    expected = F.kl_div(log_p, teacher, reduction="batchmean")
    torch.testing.assert_close(kl_rows(teacher, log_p).mean(), expected)


def test_a_certain_teacher_costs_no_nan():
    teacher = torch.tensor([[1.0, 0.0, 0.0]])
    logits = torch.tensor([[0.0, 0.0, -200.0]], requires_grad=True)
    loss = kl_rows(teacher, torch.log_softmax(logits, -1)).sum()
    loss.backward()
    torch.testing.assert_close(loss.item(), torch.log(torch.tensor(2.0)).item())
    assert torch.isfinite(logits.grad).all()


def test_ties_go_to_the_lowest_class():
    scores = torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.2, 0.8]])
    assert correct_count(scores, torch.tensor([0, 1, 1])).item() == 2


def signal(name: str, rows: int) -> tuple[Posteriors, Samples, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    labels = torch.randint(4, (rows,), generator=generator)
    p = torch.softmax(torch.randn(rows, 4, generator=generator), -1)
    return Posteriors.of(name, 1, p, labels), Samples(torch.zeros(rows, 2), labels), p


def test_teachers_count_equally_whatever_the_size_of_their_batches():
    signals = [signal("a", 3), signal("b", 8)]
    lesson = Lesson.join([s[0] for s in signals], [s[1] for s in signals])
    logits = randn(11, 4)
    ce, kl = mutual_losses(logits, lesson)
    parts = [(logits[:3], *signals[0]), (logits[3:], *signals[1])]
    expected_ce = sum(F.cross_entropy(z, samples.labels) for z, _, samples, _ in parts) / 2
    expected_kl = 0.0
    for z, _, samples, p in parts:
        accuracy = (p.argmax(1) == samples.labels).double().mean()
        expected_kl += accuracy * F.kl_div(torch.log_softmax(z, -1), p.double(), reduction="batchmean") / 2
    torch.testing.assert_close(ce, expected_ce)
    torch.testing.assert_close(kl, expected_kl)


def test_a_temperature_softens_both_sides():
    """What receivers make of posteriors is what senders would have made of logits."""
    generator = torch.Generator().manual_seed(3)
    said, labels = torch.randn(5, 4, generator=generator), torch.arange(5) % 4
    message = Posteriors.of("a", 1, torch.softmax(said, -1), labels)
    lesson = Lesson.join([message], [Samples(torch.zeros(5, 2), labels)])._replace(confidence=torch.ones(5))
    logits = randn(5, 4)
    ce, kl = mutual_losses(logits, lesson, 4.0)
    torch.testing.assert_close(kl, distillation(said.double(), logits, 4.0), rtol=1e-6, atol=1e-9)
    assert torch.equal(ce, mutual_losses(logits, lesson)[0])
    certain = lesson._replace(teacher=F.one_hot(labels, 4).float())
    assert torch.isfinite(mutual_losses(logits, certain, 4.0)[1])


def test_losses_stack_and_read_nothing():
    message, batch, _ = signal("a", 6)
    lesson = Lesson.join([message], [batch])
    logits = randn(3, 6, 4)
    stacked = torch.func.vmap(lambda z: mutual_losses(z, lesson))(logits)
    broadcast = mutual_losses(logits, Lesson(*(part.expand(3, *part.shape) for part in lesson[:5])))
    for i in range(3):
        for k, single in enumerate(mutual_losses(logits[i], lesson)):
            torch.testing.assert_close(stacked[k][i], single)
            torch.testing.assert_close(broadcast[k][i], single)
    whole = Lesson.join([message, message], [batch, batch])
    many = Posteriors("", 1, message.values.expand(3, 6, 4), message.correct.expand(3))
    samples = Samples(batch.inputs.expand(3, 6, 2), batch.labels.expand(3, 6))
    stacked_lesson = Lesson.join([many, many], [samples, samples])
    for name, part in zip(whole._fields[:4], whole, strict=False):
        expected = part if name == "weight" else part.expand(3, *part.shape)
        assert torch.equal(getattr(stacked_lesson, name), expected), name
    with FakeTensorMode() as mode:
        fake = Lesson(*(mode.from_tensor(part) for part in lesson[:4]))
        assert mutual_losses(torch.randn(6, 4), fake)[0].shape == ()
