"""How the nodes of a run have done so far: their best models, what else a method wants tested, and their conflicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from fedh2l.engines.base import Engine, Which
from fedh2l.metrics import average, scores


class ViewScore(NamedTuple):
    """How the best of a view did."""

    validated: int
    """Validation samples that it got right."""
    round: int
    tested: list[int]
    """Test samples of each domain that it got right."""


class Standing:
    """What selection and the result need to know of earlier evaluations; saved with every checkpoint."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.best: dict[str, tuple[int, int]] = {}
        """For each node, the validation samples that its best model got right, and the round of that model."""
        self.views: dict[str, dict[str, ViewScore]] = {}
        """For each view and node, how the best of it did so far."""
        self._present: dict[str, int] = {}
        self._conflicts = (0.0, 0)  # how many, of how many mutual steps

    def take(self, counts: Mapping[str, int], round: int) -> list[str]:
        """Notes what each node's model gets right of the validation data; returns whose is as good as ever.

        Of models that do equally well the latest counts: where nearly all validation data is right, as it soon may be,
        it cannot tell a model from one that has learned for longer.
        """
        best = [name for name, right in counts.items() if right >= self.best.get(name, (0, 0))[0]]
        self.best |= {name: (counts[name], round) for name in best}
        self._present = dict(counts)
        return best

    def take_views(self, engine: Engine, tests: Sequence[Any], round: int, always: bool) -> None:
        """Views have no weights to keep, so what is best on validation data (or `always`) is tested at once."""
        for view, counts in engine.validate_views().items():
            known = self.views.setdefault(view, {})
            best = [name for name, right in counts.items() if always or name not in known or right >= known[name][0]]
            if best:
                tested = engine.correct_view(view, best, tests)
                known |= {name: ViewScore(counts[name], round, tested[name]) for name in best}

    def summary(self, series: Mapping[str, Mapping[str, Sequence[float]]], samples: int) -> dict[str, dict[str, float]]:
        """What an evaluation says of each node, from its score on so many samples and what it recorded since."""
        nodes = {}
        for name in self.names:
            nodes[name] = {
                "validation_ACC": 100 * self._present[name] / samples,
                "best_round": self.best[name][1],
                **{key: fmean(values) for key, values in sorted(series[name].items())},
            }
            conflicts = series[name].get("conflict_rate", [])
            self._conflicts = (self._conflicts[0] + sum(conflicts), self._conflicts[1] + len(conflicts))
        return nodes

    def validated(self, which: Which) -> list[int]:
        """What each node's best or last model got right of the validation data."""
        return [self.best[name][0] if which == "best" else self._present[name] for name in self.names]

    def best_rounds(self) -> list[int]:
        """When each node's best model was taken."""
        return [self.best[name][1] for name in self.names]

    def view_averages(self, totals: Sequence[int]) -> dict[str, dict[str, float]]:
        """The metrics of each view, averaged over the nodes; `totals` are the sizes of the test sets."""
        return {
            view: average([scores(best[name].tested, totals, own) for own, name in enumerate(self.names)])
            for view, best in self.views.items()
        }

    @property
    def conflict_rate(self) -> float:
        """The share of mutual steps in which the teaching gradient conflicted with the local one."""
        return self._conflicts[0] / max(self._conflicts[1], 1)

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"best": self.best, "views": self.views, "conflicts": self._conflicts}

    def restore(self, state: Mapping[str, Any]) -> None:
        """From a checkpoint."""
        self.best = {name: (right, round) for name, (right, round) in state["best"].items()}
        self.views = {
            view: {name: ViewScore(*score) for name, score in of_nodes.items()}
            for view, of_nodes in state["views"].items()
        }
        self._conflicts = tuple(state["conflicts"])
