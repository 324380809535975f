"""A model whose process misbehaves as the environment says: what a network alone could not do to a peer.

A peer that names `faulty:net` as its model, started with FAULT and a value below, is killed at a moment that no test
could hit from outside, or sends what no sound peer would send, with a certificate that is in order.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable

import grpc

from fedh2l.models.small import mlp
from fedh2l.peer.transport import fedh2l_pb2 as pb
from fedh2l.peer.transport.client import PeerClient
from fedh2l.peer.transport.sender import Sender
from fedh2l.protocol.messages import round_of
from fedh2l.runs import checkpoints

FAULT, SLOW = "FEDH2L_TEST_FAULT", "FEDH2L_TEST_SLOW"
"""What goes wrong; and seconds that every pass through the network takes longer."""
AT = 120
"""The round in which it is killed, or begins to misbehave."""
UNTIL = AT + 60


def net(num_classes: int, input_shape: tuple[int, ...]):
    FAULTS.get(os.environ.get(FAULT, ""), lambda: None)()
    made, seconds = mlp(num_classes, input_shape, [32]), float(os.environ.get(SLOW, "0"))
    if seconds:
        made.register_forward_pre_hook(lambda *_: time.sleep(seconds))
    return made


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _before_sending() -> None:
    send = Sender.send

    def sending(self: Sender, round: int, payload: bytes) -> None:
        if round >= AT:
            _die()
        send(self, round, payload)

    Sender.send = sending


def _after_half() -> None:
    call, begun, answered = PeerClient.call, [], []

    def calling(self: PeerClient, method: str, message, *rest):
        if method != "Teach" or round_of(message.posteriors) < AT:
            return call(self, method, message, *rest)
        begun.append(self.member)
        if len(begun) > 2:
            time.sleep(60)  # the third is never sent to
        reply = call(self, method, message, *rest)
        answered.append(reply)
        if len(answered) == 2:
            _die()
        return reply

    PeerClient.call = calling


def _writing_a_checkpoint() -> None:
    write = checkpoints.write_atomically

    def writing(path, *parts: bytes, private: bool = False) -> None:
        if path.suffix == ".ckpt" and int(path.stem.removeprefix("round-")) >= AT:
            data = b"".join(parts)
            path.with_name(f".{path.name}.partial").write_bytes(data[: len(data) // 2])
            _die()
        write(path, *parts, private=private)

    checkpoints.write_atomically = writing


def _teaches(otherwise: Callable) -> None:
    """Signals of some rounds are sent in another way."""
    call = PeerClient.call

    def calling(self: PeerClient, method: str, message, reply, timeout: float):
        if method == "Teach" and AT <= round_of(message.posteriors) < UNTIL:
            return otherwise(lambda said: call(self, method, said, reply, timeout), message)
        return call(self, method, message, reply, timeout)

    PeerClient.call = calling


def _duplicated() -> None:
    def twice(teach: Callable, message: pb.Signal):
        receipt = teach(message)
        try:
            teach(message)
        except grpc.RpcError as error:
            if not any(why in error.details() for why in ("seen before", "is past")):
                raise
        return receipt

    _teaches(twice)


def _truncated() -> None:
    _teaches(lambda teach, message: teach(pb.Signal(posteriors=message.posteriors[: len(message.posteriors) // 2])))


def _reordered() -> None:
    """Every other signal leaves only after the one that follows it."""
    send, held = Sender.send, {}

    def sending(self: Sender, round: int, payload: bytes) -> None:
        if AT <= round < UNTIL and round % 2 == 0:
            held[self] = (round, payload)
            logging.getLogger("fedh2l.peer").info("holds back round %d", round)
            return
        send(self, round, payload)
        if self in held:
            send(self, *held.pop(self))

    Sender.send = sending


FAULTS: dict[str, Callable[[], None]] = {
    "before sending": _before_sending,
    "after half": _after_half,
    "writing a checkpoint": _writing_a_checkpoint,
    "duplicated": _duplicated,
    "reordered": _reordered,
    "truncated": _truncated,
}
