"""What a run ends with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fedh2l.metrics import average, scores


@dataclass(frozen=True)
class NodeResult:
    """One node's model on everybody's test data, in percent: the selected model, and the last one."""

    name: str
    model: str
    ACC: float
    WDP: float
    CDP: float
    round: int
    """When the selected model was taken."""
    validation: float
    """Its ACC on the pooled validation data, by which it was selected."""
    last: dict[str, float]


@dataclass(frozen=True)
class Result:
    """The result of a run. Two runs are equal when they agree in everything but `seconds`."""

    method: str
    seed: int
    rounds: int
    selection: str
    nodes: list[NodeResult]
    average: dict[str, float]
    last: dict[str, float]
    matrix: list[list[float]]
    """`matrix[i][j]`: the selected model of node i on the test data of domain j."""
    bytes: dict[str, Any]
    conflict_rate: float
    """Share of mutual steps in which the teaching gradient conflicted with the local one."""
    seconds: float
    views: dict[str, dict[str, float]] = field(default_factory=dict)
    """What else the method had tested, selected alike: averages over the nodes of the meme of FML, say."""

    def to_dict(self) -> dict[str, Any]:
        """The JSON of the result."""
        return asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Result:
        """From the JSON of a result."""
        return Result(**{**data, "nodes": [NodeResult(**node) for node in data["nodes"]]})


def node_results(
    names: Sequence[str],
    models: Sequence[str],
    selected: Sequence[Sequence[int]],
    last: Sequence[Sequence[int]],
    totals: Sequence[int],
    rounds: Sequence[int],
    validation: Sequence[float],
) -> list[NodeResult]:
    """Results from counts: `selected[i][j]` of `totals[j]` right by the selected model of node i on domain j."""
    return [
        NodeResult(
            name,
            models[i],
            **scores(selected[i], totals, i),
            round=rounds[i],
            validation=validation[i],
            last=scores(last[i], totals, i),
        )
        for i, name in enumerate(names)
    ]


def summarise(nodes: Sequence[NodeResult]) -> tuple[dict[str, float], dict[str, float]]:
    """Means over the nodes, of the selected and of the last models."""
    selected = [{"ACC": node.ACC, "WDP": node.WDP, "CDP": node.CDP} for node in nodes]
    return average(selected), average([node.last for node in nodes])
