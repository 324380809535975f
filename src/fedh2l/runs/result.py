"""The result of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from fedh2l.errors import RunError, shown
from fedh2l.training.metrics import METRICS, average, scores

if TYPE_CHECKING:
    from fedh2l.experiment.settings import RunSettings  # it needs PyTorch, and showing a result does not

MOST_BYTES = 1e300
"""Upper bound for a plausible number of bytes."""


@dataclass(frozen=True)
class NodeResult:
    """Metrics of one node's selected model and last model on all test data, in percent."""

    name: str
    model: str
    ACC: float
    WDP: float
    CDP: float
    round: int
    """Round of the selected model."""
    validation: float
    """ACC on the pooled validation data, used for selection."""
    last: dict[str, float]


@dataclass(frozen=True)
class Result:
    """The result of a run. Equal runs agree in everything but `seconds`."""

    method: str
    seed: int
    rounds: int
    selection: str
    nodes: list[NodeResult]
    average: dict[str, float]
    last: dict[str, float]
    matrix: list[list[float]]
    """`matrix[i][j]`: accuracy of the selected model of node i on the test data of domain j."""
    bytes: dict[str, Any]
    conflict_rate: float
    """Share of mutual steps in which the teaching gradient conflicted with the local one."""
    seconds: float
    views: dict[str, dict[str, float]] = field(default_factory=dict)
    """Averages over the nodes of the method's extra evaluations, such as the meme of FML. Models are selected alike."""

    @staticmethod
    def from_counts(
        method: str,
        settings: RunSettings,
        models: Mapping[str, str],
        selected: Sequence[Sequence[int]],
        last: Sequence[Sequence[int]],
        totals: Sequence[int],
        taken: Sequence[int],
        validation: Sequence[float],
        **rest: Any,
    ) -> Result:
        """Return the result of a run from counts of correct answers.

        `models` are the names of the nodes and of their models. The selected model of node i is from round `taken[i]`,
        and right on `selected[i][j]` of the `totals[j]` test samples of domain j. `rest` are further values.
        """
        nodes = [
            NodeResult(
                name,
                model,
                **scores(selected[i], totals, i),
                round=taken[i],
                validation=validation[i],
                last=scores(last[i], totals, i),
            )
            for i, (name, model) in enumerate(models.items())
        ]
        return Result(
            method=method,
            seed=settings.seed,
            rounds=settings.rounds,
            selection=settings.selection,
            nodes=nodes,
            average=average([{"ACC": node.ACC, "WDP": node.WDP, "CDP": node.CDP} for node in nodes]),
            last=average([node.last for node in nodes]),
            matrix=[[100 * count / total for count, total in zip(row, totals, strict=True)] for row in selected],
            **rest,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Result:
        """Return the result from JSON values. Raise `RunError` for anything else."""
        try:
            result = Result(**{**data, "nodes": [NodeResult(**node) for node in data["nodes"]]})
            return _checked(result)
        except ValidationError as error:
            first = error.errors()[0]
            raise RunError(f"the saved result is damaged: {first['loc']}: {first['msg']}") from error
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise RunError(f"the saved result is damaged: {shown(error)}") from error


def _checked(result: Result) -> Result:
    """Return a result from a file. Refuse missing values and values of another type."""
    result = TypeAdapter(Result).validate_python(result.to_dict())
    tables = (result.average, result.last, *result.views.values(), *(node.last for node in result.nodes))
    traffic = [result.bytes.get(key) for key in ("total", "per_round", "multicast")]
    if any(set(METRICS) - set(table) for table in tables):
        raise ValueError(f"{', '.join(METRICS)} belong together")
    if not all(isinstance(size, (int, float)) and 0 <= size < MOST_BYTES for size in traffic) or result.rounds < 1:
        raise ValueError("what was sent is not known")
    return result
