"""The base class of methods: a frozen set of parameters and a few hooks.

A method has no state. Its state belongs to a node or to the server, in their `memory` and `networks`, so every engine
can save, move and stack it. Losses and projections are pure functions of tensors.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

from pydantic import PrivateAttr
from torch import Tensor

from fedh2l.errors import ConfigError, MessageError
from fedh2l.protocol.messages import PLAIN, Encoding, Kind, Message
from fedh2l.protocol.roster import Roster
from fedh2l.protocol.topology import Graph
from fedh2l.section import Section
from fedh2l.training.learner import Learner, architectures
from fedh2l.training.node import Node
from fedh2l.training.node_learner import NodeLearner
from fedh2l.training.server import Server

Preset = Mapping[str, Any]
"""Values by `section.key`."""
ABOUT_PUBLIC_DATA: tuple[Kind, ...] = ("posteriors", "logits")
PublicData = Literal["all", "some", "none"]
"""Nodes that need public data: all of them, some (at least one), or none."""


class Method(Section):
    """A federated method. Its fields are the keys of the `[method]` section.

    Only `local_step` is required. A method that exchanges messages defines its rounds in `exchanges`, the messages in
    `sends` and `emit`, and the update in `receive`. Without a server, `teachers` selects the senders for each node.
    With a server (`decentralised = False`), `aggregate` computes an answer for each node from the messages of all
    nodes.
    """

    name: ClassVar[str]
    heterogeneous: ClassVar[bool | Literal["partly"]] = True
    """Whether nodes may have different architectures. `partly` if some layers are the same on all nodes."""
    decentralised: ClassVar[bool] = True
    """Whether it works without a server."""
    sends: ClassVar[tuple[Kind, ...]] = ()
    """Kinds of messages between nodes, or between nodes and the server."""
    depends_on_rounds: ClassVar[bool] = False
    """Whether a round depends on the total number of rounds. If so, a run cannot be extended."""
    presets: ClassVar[Mapping[str, Preset]] = {}
    """Named sets of values, selected by `method.preset`. `native` has the values of the method's own paper or code."""

    _path: str = PrivateAttr("")

    @property
    def title(self) -> str:
        """Return the value of `method.name`: a name, or the path of a user's class."""
        return self._path or self.name

    @classmethod
    def parameter_free(cls) -> bool:
        """Return whether its messages have no parameters and no gradients."""
        return not set(cls.sends) & {"parameters", "gradients"}

    @classmethod
    def keeps_private_data(cls) -> bool:
        """Return whether no message has values computed from single private samples."""
        return "features" not in cls.sends

    def crossing(self) -> str:
        """Describe the content of its messages in words."""
        return " and ".join(f"{kind} on public data" if kind in ABOUT_PUBLIC_DATA else kind for kind in self.sends)

    # Before the first round

    def check(self, roster: Roster) -> None:
        """Raise an error for an experiment that this method cannot run. The default accepts all."""

    def adapt(self, nodes: Sequence[Node]) -> Sequence[Node]:
        """Return the nodes with models that this method can train. The default changes nothing."""
        return nodes

    def fitted(self, learners: Sequence[NodeLearner], rounds: int) -> Self:
        """Return a copy with the values that depend on models, data or the number of rounds.

        A method that uses `rounds` must set `depends_on_rounds`.
        """
        return self

    def prepare(self, server: Server, learners: Sequence[NodeLearner]) -> None:
        """Initialise the state of server and nodes before the first round."""

    # A round

    @abstractmethod
    def local_step(self, node: Learner, round: int) -> None:
        """Train on the node's local data. Rounds count from 1."""

    def exchanges(self, round: int) -> bool:
        """Return whether nodes send messages in this round."""
        return False

    def kind_of_round(self, round: int) -> Hashable:
        """Return a key that is equal for rounds with the same operations on the same memory.

        An engine may record one round and replay it for all rounds with the same key. Override this if rounds differ by
        more than the exchange.
        """
        return self.exchanges(round)

    @property
    def keeps(self) -> bool:
        """Return whether nodes keep received messages for later rounds. If so, it must define `forget`."""
        return False

    def forget(self, node: Learner) -> None:
        """Drop the messages that a node has kept, after public data changed or a teacher was removed."""

    def emit(self, node: Learner, round: int) -> Message:
        """Return the node's message, in a round with an exchange."""
        raise NotImplementedError(f"{self.title} exchanges messages, so it must implement emit")

    def teachers(self, roster: Roster, round: int) -> Graph:
        """Return each node's teachers in a round with an exchange and without a server. The default is all others."""
        return {name: roster.others(name) for name in roster.names}

    def aggregate(self, server: Server, messages: Sequence[Message], round: int) -> Mapping[str, Message]:
        """Return the server's answer to each node. `messages` are in roster order."""
        raise NotImplementedError(f"{self.title} has a server, so it must implement aggregate")

    def receive(self, node: Learner, inbox: Sequence[Message], round: int) -> None:
        """Update the node from its inbox, in a round with an exchange.

        The inbox has the messages of the teachers in roster order, and may be empty. With a server, it has one answer.
        """
        raise NotImplementedError(f"{self.title} exchanges messages, so it must implement receive")

    def closing(self, server: Server, round: int) -> Message | None:
        """Return the server's message that completes the nodes' models after the last round, if there is one."""
        return None

    def complete(self, node: Learner, message: Message) -> None:
        """Complete the node's model with the message of `closing`.

        This is done before every evaluation, and its bytes are counted once. It must not change the next round.
        """

    def views(self, node: Learner) -> Mapping[str, Callable[[Tensor], Tensor]]:
        """Return extra models to evaluate: functions from inputs to logits, by name."""
        return {}

    def needs_labels(self) -> list[str]:
        """Return the settings that need labels of public data, as `key = value`.

        The default assumes that labels are needed. Override this in a method that does not read them.
        """
        return [f"method.name = '{self.title}'"]

    def needs_public_data(self) -> PublicData:
        """Return which nodes must have public data.

        The default assumes that all must. Override this in a method that needs less.
        """
        return "all"

    @classmethod
    def recommends(cls, public_labels: bool) -> Preset:
        """Return recommended values for keys that the user did not set, given whether public data has labels."""
        return {}

    @classmethod
    def advice(cls, section: str, public_labels: bool) -> Preset:
        """Return the recommended values for the keys of one section."""
        recommended = cls.recommends(public_labels).items()
        return {key.partition(".")[2]: value for key, value in recommended if key.startswith(f"{section}.")}

    @property
    def averages(self) -> bool:
        """Return whether averaged weights are a complete model. They are not if the server adds layers."""
        return type(self).complete is Method.complete

    @property
    def written(self) -> Encoding:
        """Return the encoding of its posteriors."""
        return PLAIN

    def public_batch_rows(self, batch_size: int) -> int:
        """Return the largest number of public samples per message. Small public data has fewer."""
        return batch_size


def check_declared(method: Method, message: Message) -> None:
    """Raise an error for a message of a kind or encoding that the method does not declare."""
    if message.kind not in method.sends:
        raise MessageError(f"{method.title} sends {message.kind}, which it does not declare in `sends`")
    if message.kind == "posteriors" and message.encoding != method.written:
        raise MessageError(f"{method.title} sends posteriors in {message.encoding}, and {method.written} in `written`")


def require_one_architecture(learners: Sequence[NodeLearner], method: str, able: Sequence[str]) -> None:
    """Raise an error if nodes have different models and the method averages parameters. Suggest methods from `able`."""
    groups = list(architectures(learners).values())
    if len(groups) > 1:
        listed = "; ".join(", ".join(f"'{name}'" for name in names) for names in groups)
        raise ConfigError(
            f"method.name: {method} averages parameters, so all nodes need the same model, but there are "
            f"{len(groups)} architectures: {listed}. Methods for different models: {', '.join(able)}"
        )
