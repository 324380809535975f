"""What a method is: a frozen set of parameters and a few hooks.

A method keeps no state of its own. What it must remember belongs to a node or to the server and lives in their
`memory` and `networks`, so that every engine can save it, move it and stack it. Losses and projections are pure
functions of tensors.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

from pydantic import PrivateAttr
from torch import Tensor

from fedh2l.errors import ConfigError, MessageError
from fedh2l.learner import Learner, architectures
from fedh2l.messages import PLAIN, Encoding, Kind, Message
from fedh2l.node import Node
from fedh2l.roster import Roster
from fedh2l.section import Section
from fedh2l.server import Server
from fedh2l.topology import Graph

Preset = Mapping[str, Any]
"""Values by `section.key`."""


class Method(Section):
    """A federated method. Its fields are the keys of the `[method]` section.

    Only `local_step` must be written. A method that exchanges says when (`exchanges`) and what (`sends`, `emit`), and
    learns from it in `receive`. Without a server, `teachers` says who hears whom; with one (`decentralised = False`),
    `aggregate` turns what all nodes sent into an answer for each.
    """

    name: ClassVar[str]
    heterogeneous: ClassVar[bool | Literal["partly"]] = True
    """Whether nodes may have models of different architectures; partly, if some of it is common to all."""
    decentralised: ClassVar[bool] = True
    """Whether it does without a server."""
    sends: ClassVar[tuple[Kind, ...]] = ()
    """What crosses between nodes, or between a node and the server."""
    presets: ClassVar[Mapping[str, Preset]] = {}
    """Named sets of values, chosen by `method.preset`; `native` is what the method's own paper or code used."""

    _path: str = PrivateAttr("")

    @property
    def title(self) -> str:
        """What `method.name` says: the method's name, or the path of a class of the user's own."""
        return self._path or self.name

    @classmethod
    def parameter_free(cls) -> bool:
        """Whether no parameters and no gradients cross."""
        return not set(cls.sends) & {"parameters", "gradients"}

    @classmethod
    def keeps_private_data(cls) -> bool:
        """Whether nothing that crosses is computed sample by sample on private data."""
        return "features" not in cls.sends

    def crossing(self) -> str:
        """What crosses, in words."""
        return " and ".join(self.sends)

    # Before the first round

    def check(self, roster: Roster) -> None:
        """Refuses a federation that this method cannot run; the default takes any."""

    def adapt(self, nodes: Sequence[Node]) -> Sequence[Node]:
        """The nodes with models as this method needs them; the default takes them as they are."""
        return nodes

    def fitted(self, learners: Sequence[Learner], rounds: int) -> Self:
        """The method with what depends on models, data or the length of the run worked out."""
        return self

    def prepare(self, server: Server, learners: Sequence[Learner]) -> None:
        """Gives server and nodes what they start with, before the first round."""

    def equip(self, node: Learner) -> None:
        """Gives a node what it keeps beside its model, before the first round, seeing no other: a peer does it too."""

    # A round

    @abstractmethod
    def local_step(self, node: Learner, round: int) -> None:
        """Train on what the node holds. Rounds count from 1."""

    def exchanges(self, round: int) -> bool:
        """Whether anything crosses between nodes in this round."""
        return False

    def kind_of_round(self, round: int) -> Hashable:
        """Rounds of one kind do the same operations, given the same memory, so an engine may record one and repeat it.

        A method whose rounds differ by more than whether they exchange says so here.
        """
        return self.exchanges(round)

    @property
    def keeps(self) -> bool:
        """Whether a node learns from what it received later, too; then it must be able to `forget` it."""
        return False

    def forget(self, node: Learner) -> None:
        """Drops what a node keeps of what others sent: public data is another, or somebody may not teach any more."""

    def emit(self, node: Learner, round: int) -> Message:
        """What leaves the node, in a round that exchanges."""
        raise NotImplementedError(f"{self.title} exchanges, but does not say what a node sends")

    def teachers(self, roster: Roster, round: int) -> Graph:
        """Without a server: whom each member hears in a round that exchanges; by default everybody else."""
        return {name: roster.others(name) for name in roster.names}

    def aggregate(self, server: Server, messages: Sequence[Message], round: int) -> Mapping[str, Message]:
        """With a server: its answer to each node, from what all of them sent, in roster order."""
        raise NotImplementedError(f"{self.title} has a server, but does not say what it answers")

    def receive(self, node: Learner, inbox: Sequence[Message], round: int) -> None:
        """Learn from what came in, in a round that exchanges.

        The inbox holds the signals of teachers in roster order, and may be empty; or the one answer of a server.
        """
        raise NotImplementedError(f"{self.title} exchanges, but does not say what a node learns")

    def anticipate(self, node: Learner, senders: Sequence[str], round: int) -> None:
        """What of `receive` can be done before the messages of these senders are there; it waits in `node.ready`.

        Called where there is time for it, or not at all, and then perhaps in vain: it must leave no other trace.
        """

    def closing(self, server: Server, round: int) -> Message | None:
        """What a server sends to every node once, after the last round, for its model to be complete."""
        return None

    def complete(self, node: Learner, message: Message) -> None:
        """Takes in the message of `closing`; done before every evaluation, and counted once.

        It completes what is evaluated, and must change nothing that the next round depends on.
        """

    def views(self, node: Learner) -> Mapping[str, Callable[[Tensor], Tensor]]:
        """What else to test beside the node's model: functions from inputs to logits, by name."""
        return {}

    def needs_labels(self) -> list[str]:
        """What of its settings needs to know the labels of public data, as `key = value`; nothing: it can do without.

        The default is on the safe side: a method that reads no label of public data says so here.
        """
        return [f"method.name = '{self.title}'"]

    @classmethod
    def recommends(cls, public_labels: bool) -> Preset:
        """What to set where nothing is said, given whether public data has labels."""
        return {}

    @classmethod
    def advice(cls, section: str, public_labels: bool) -> Preset:
        """What it recommends for the keys of a section."""
        recommended = cls.recommends(public_labels).items()
        return {key.partition(".")[2]: value for key, value in recommended if key.startswith(f"{section}.")}

    @property
    def averages(self) -> bool:
        """Whether an average of a node's weights is a model: not where half of it is brought from a server."""
        return type(self).complete is Method.complete

    @property
    def written(self) -> Encoding:
        """How posteriors are written that it sends."""
        return PLAIN

    @property
    def wants_average(self) -> bool:
        """Whether it does something with the average of a node's weights."""
        return False

    def public_batch_rows(self, batch_size: int) -> int:
        """How many public samples a teaching signal speaks of, before the size of the public data limits it."""
        return batch_size


def check_declared(method: Method, message: Message) -> None:
    """Refuses a message of a kind that the method does not declare."""
    if message.kind not in method.sends:
        raise MessageError(f"{method.title} sends {message.kind}, which it does not declare in `sends`")
    if message.kind == "posteriors" and message.encoding != method.written:
        raise MessageError(f"{method.title} sends posteriors in {message.encoding}, and {method.written} in `written`")


def require_one_architecture(learners: Sequence[Learner], method: str, able: Sequence[str]) -> None:
    """Refuses different models for a method that averages parameters; names the nodes and the methods that could."""
    groups = list(architectures(learners).values())
    if len(groups) > 1:
        listed = "; ".join(", ".join(f"'{name}'" for name in names) for names in groups)
        raise ConfigError(
            f"method.name: {method} averages parameters, so all nodes need the same model, but there are "
            f"{len(groups)} architectures: {listed}. Methods for different models: {', '.join(able)}"
        )
