"""A process of this machine with some nodes in it, from both ends of its line."""

from __future__ import annotations

import io
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from fedh2l.engines.actor import Actor, Common, Leg, Part, Size
from fedh2l.engines.base import NodesLostError
from fedh2l.errors import FedH2LError, RunError
from fedh2l.messages import Message

START = "from fedh2l.engines.worker import serve; serve({fd})"
KEEPING = {"MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": str(1 << 25)}
"""For glibc: a training asks for the same memory in every round, so it is kept rather than given back and cleared."""


class Worker:
    """The engine's end: requests are answered in order."""

    def __init__(self, parts: Sequence[Part], common: Common, cores: int) -> None:
        self._luggage = packed((list(parts), common, cores))
        self._owed = 0
        """Answers that are still to come."""
        self._start()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
            environment = {**KEEPING, **os.environ, "PYTHONPATH": paths}
            command = [sys.executable, "-c", START.format(fd=theirs.fileno())]
            self._process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])
        self._line = Connection(ours.detach())
        self._line.send_bytes(self._luggage)
        self._owed = 1

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def tell(self, what: str, *arguments: Any) -> None:
        """Asks for a method of the actor."""
        try:
            self._line.send_bytes(packed((what, arguments)))
            self._owed += 1
        except OSError:
            raise NodesLostError from None

    def answer(self) -> Any:
        """What it says to the first request that it has not answered yet; an exception is returned, not raised."""
        try:
            answer = pickle.loads(self._line.recv_bytes())
            self._owed -= 1
        except (OSError, EOFError):
            return NodesLostError()
        return answer

    def alive(self) -> bool:
        """Whether it is still there, once it has answered all it was asked."""
        while self._owed:
            if isinstance(self.answer(), NodesLostError):
                return False
        return self._process.poll() is None

    def restart(self) -> None:
        """A new process in the place of the old one."""
        self.end()
        self._start()

    def end(self) -> None:
        """Ends the process; it holds nothing that must be saved."""
        self._line.close()
        self._process.kill()
        self._process.wait()


class _Pickler(pickle.Pickler):
    """Sends tensors as arrays: torch's own way is made for files, and takes ten times as long for small ones."""

    def reducer_override(self, value: Any) -> Any:
        plain = type(value) is Tensor and not value.requires_grad and value.dtype is not torch.bfloat16
        return (torch.from_numpy, (value.numpy(),)) if plain else NotImplemented


def packed(value: Any) -> bytes:
    """As bytes that `pickle.loads` reads."""
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


Sealed = bytes
"""A message as it travels: only its receivers open it."""


def sealed(message: Message) -> Sealed:
    """To be sent, once or several times."""
    return packed(message)


def unsealed(data: Sealed) -> Message:
    """What was sealed."""
    message: Message = pickle.loads(data)
    return message


def checked(answers: Sequence[Any]) -> list[Any]:
    """Answers, or the first exception among them; a process that died explains what others say."""
    failed = [answer for answer in answers if isinstance(answer, Exception)]
    for error in sorted(failed, key=lambda error: not isinstance(error, NodesLostError)):
        raise error
    return list(answers)


def serve(fd: int) -> None:
    """The process's end: answers until the line is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the engine too, which ends this in order
    logging.basicConfig(level=logging.ERROR)
    line = Connection(fd)
    actor: Actor | None = None
    while True:
        try:
            request = pickle.loads(line.recv_bytes())
        except EOFError:
            return
        except Exception as error:  # whatever a user's classes do when they are read
            _reply(line, _sendable(error))
            continue
        try:
            if actor is None:
                parts, common, cores = request
                actor = Actor(parts, common, cores, "cpu")
                _reply(line, None)
            else:
                what, arguments = request
                if what == "leg":
                    _reply(line, _leg(actor, *arguments))
                    actor.anticipate(arguments[0])
                else:
                    _reply(line, getattr(actor, what)(*arguments))
        except Exception as error:  # whatever a user's model or method does
            _reply(line, _sendable(error))


def _leg(actor: Actor, leg: Leg, heard: Mapping[str, Sealed]) -> tuple[dict[str, Sealed], dict[str, Size]]:
    sends, sizes = actor.leg(leg, {sender: unsealed(message) for sender, message in heard.items()})
    return {sender: sealed(message) for sender, message in sends.items()}, sizes


def _reply(line: Connection, answer: Any) -> None:
    try:
        line.send_bytes(packed(answer))
    except OSError:
        sys.exit(0)  # nobody is there any more


def _sendable(error: Exception) -> Exception:
    if isinstance(error, FedH2LError):
        return error
    log = "".join(traceback.format_exception(error))
    return RunError(f"{type(error).__name__}: {error}\n{log}")
