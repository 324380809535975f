"""Messages between nodes: their kinds, their byte form, and the checks of a receiver."""

from fedh2l.protocol.messages.base import Kind, Message
from fedh2l.protocol.messages.encodings import PLAIN, Encoding
from fedh2l.protocol.messages.kinds import KINDS, Features, Gradients, Logits, Parameters, Posteriors, Scalars, Vector
from fedh2l.protocol.messages.wire import SERVER, decode, encode, encoded_size, round_of

__all__ = [
    "KINDS",
    "PLAIN",
    "SERVER",
    "Encoding",
    "Features",
    "Gradients",
    "Kind",
    "Logits",
    "Message",
    "Parameters",
    "Posteriors",
    "Scalars",
    "Vector",
    "decode",
    "encode",
    "encoded_size",
    "round_of",
]
