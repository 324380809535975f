"""Model selection during a run: the nodes' best models, extra evaluations of a method, and conflicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from fedh2l.engines.base import Models, Which
from fedh2l.training.metrics import average, scores


class ViewScore(NamedTuple):
    """Scores of the best model in an extra evaluation."""

    validated: int
    """Correct validation samples."""
    round: int
    tested: list[int]
    """Correct test samples per domain."""


class ModelSelection:
    """Results of earlier evaluations, for model selection and the final result. Saved in every checkpoint."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.best: dict[str, tuple[int, int]] = {}
        """Correct validation samples and round of each node's best model."""
        self.views: dict[str, dict[str, ViewScore]] = {}
        """Best scores so far, by extra evaluation and node."""
        self._present: dict[str, int] = {}
        self._conflicts = (0.0, 0)  # conflicts, mutual steps

    def take(self, counts: Mapping[str, int], round: int) -> list[str]:
        """Record each model's correct validation samples. Return the nodes whose model is at least as good as before.

        Ties go to the latest model. Late in training nearly all validation data is right, so it cannot tell a model
        from one that has trained longer.
        """
        best = [name for name, right in counts.items() if right >= self.best.get(name, (0, 0))[0]]
        self.best |= {name: (counts[name], round) for name in best}
        self._present = dict(counts)
        return best

    def take_views(self, models: Models, tests: Sequence[Any], round: int, always: bool) -> None:
        """Record the extra evaluations. Test each new best at once, because its weights are not kept.

        With `always`, every model is tested.
        """
        for view, counts in models.validate_views().items():
            known = self.views.setdefault(view, {})
            best = [name for name, right in counts.items() if always or name not in known or right >= known[name][0]]
            if best:
                tested = models.correct_view(view, best, tests)
                known |= {name: ViewScore(counts[name], round, tested[name]) for name in best}

    def summary(self, series: Mapping[str, Mapping[str, Sequence[float]]], samples: int) -> dict[str, dict[str, float]]:
        """Return each node's metrics since the last evaluation. `samples` is the number of validation samples."""
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
        """Return the correct validation samples of each node's best or last model."""
        return [self.best[name][0] if which == "best" else self._present[name] for name in self.names]

    def best_rounds(self) -> list[int]:
        """Return the round of each node's best model."""
        return [self.best[name][1] for name in self.names]

    def view_averages(self, totals: Sequence[int]) -> dict[str, dict[str, float]]:
        """Return the mean metrics of each extra evaluation. `totals` are the sizes of the test sets."""
        return {
            view: average([scores(best[name].tested, totals, own) for own, name in enumerate(self.names)])
            for view, best in self.views.items()
        }

    @property
    def conflict_rate(self) -> float:
        """Share of mutual steps in which the teaching gradient conflicted with the local one."""
        return self._conflicts[0] / max(self._conflicts[1], 1)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"best": self.best, "views": self.views, "conflicts": self._conflicts}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state from a checkpoint."""
        self.best = {name: (int(right), int(round)) for name, (right, round) in state["best"].items()}
        self.views = {
            view: {
                name: ViewScore(int(right), int(round), list(map(int, tested)))
                for name, (right, round, tested) in of_nodes.items()
            }
            for view, of_nodes in state["views"].items()
        }
        found, steps = state["conflicts"]
        self._conflicts = float(found), int(steps)
