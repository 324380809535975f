"""A process of this machine that runs some nodes, and the connection to it."""

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

from fedh2l.engines.actor import Actor, Common, Part, Size, WorkUnit
from fedh2l.engines.base import NodesLostError
from fedh2l.errors import FedH2LError, RunError
from fedh2l.protocol.messages import Message

START = "from fedh2l.engines.worker import serve; serve({fd})"
KEEPING = {"MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": str(1 << 25)}
"""Settings of glibc. Training requests the same memory in every round, so freed memory is kept."""


class Worker:
    """The engine's end of the connection. Requests are answered in order."""

    def __init__(self, parts: Sequence[Part], common: Common, cores: int) -> None:
        self._init_payload = packed((list(parts), common, cores))
        self._owed = 0
        """Number of requests that have no answer yet."""
        self._start()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
            environment = {**KEEPING, **os.environ, "PYTHONPATH": paths}
            command = [sys.executable, "-c", START.format(fd=theirs.fileno())]
            self._process = subprocess.Popen(  # noqa: S603 - this interpreter, with a fixed program
                command, env=environment, pass_fds=[theirs.fileno()]
            )
        self._line = Connection(ours.detach())
        self._line.send_bytes(self._init_payload)
        self._owed = 1

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, what: str, *arguments: Any) -> None:
        """Request a call of an actor's method."""
        try:
            self._line.send_bytes(packed((what, arguments)))
            self._owed += 1
        except OSError:
            raise NodesLostError from None

    def answer(self) -> Any:
        """Return the answer to the oldest open request. Exceptions are returned, not raised."""
        try:
            answer = pickle.loads(self._line.recv_bytes())  # noqa: S301 - from a child process of this run
            self._owed -= 1
        except (OSError, EOFError):
            return NodesLostError()
        return answer

    def alive(self) -> bool:
        """Read all open answers. Return whether the process is still running."""
        while self._owed:
            if isinstance(self.answer(), NodesLostError):
                return False
        return self._process.poll() is None

    def restart(self) -> None:
        """Replace the process with a new one."""
        self.end()
        self._start()

    def end(self) -> None:
        """Kill the process. It holds no data that must be saved."""
        self._line.close()
        self._process.kill()
        self._process.wait()


class _Pickler(pickle.Pickler):
    """Pickles tensors as arrays. PyTorch's format is made for files, and takes ten times as long for small tensors."""

    def reducer_override(self, value: Any) -> Any:
        plain = type(value) is Tensor and not value.requires_grad and value.dtype is not torch.bfloat16
        return (torch.from_numpy, (value.numpy(),)) if plain else NotImplemented


def packed(value: Any) -> bytes:
    """Encode a value as bytes that `pickle.loads` can read."""
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


Sealed = bytes
"""An encoded message. Only its receivers decode it."""


def sealed(message: Message) -> Sealed:
    """Encode a message, which can then be sent several times."""
    return packed(message)


def unsealed(data: Sealed) -> Message:
    message: Message = pickle.loads(data)  # noqa: S301 - as above: made by a process of this run
    return message


def checked(answers: Sequence[Any]) -> list[Any]:
    """Return the answers, or raise the first exception.

    A lost process comes first, because it explains the other errors.
    """
    failed = [answer for answer in answers if isinstance(answer, Exception)]
    for error in sorted(failed, key=lambda error: not isinstance(error, NodesLostError)):
        raise error
    return list(answers)


def serve(fd: int) -> None:
    """The process's end of the connection: answer requests until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C also reaches the engine, which ends this process in order
    logging.basicConfig(level=logging.ERROR)
    line = Connection(fd)
    actor: Actor | None = None
    while True:
        try:
            request = pickle.loads(line.recv_bytes())  # noqa: S301 - from the process that started this one
        except EOFError:
            return
        except Exception as error:  # user-defined classes can raise anything when unpickled
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
                else:
                    _reply(line, getattr(actor, what)(*arguments))
        except Exception as error:  # a user's model or method can raise anything
            _reply(line, _sendable(error))


def _leg(actor: Actor, unit: WorkUnit, heard: Mapping[str, Sealed]) -> tuple[dict[str, Sealed], dict[str, Size]]:
    sends, sizes = actor.unit(unit, {sender: unsealed(message) for sender, message in heard.items()})
    return {sender: sealed(message) for sender, message in sends.items()}, sizes


def _reply(line: Connection, answer: Any) -> None:
    try:
        line.send_bytes(packed(answer))
    except OSError:
        sys.exit(0)  # the engine is gone


def _sendable(error: Exception) -> Exception:
    if isinstance(error, FedH2LError):
        return error
    log = "".join(traceback.format_exception(error))
    return RunError(f"{type(error).__name__}: {error}", *log.splitlines())
