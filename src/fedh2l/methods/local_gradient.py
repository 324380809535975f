"""g_loc: what a mutual step needs to know of the local steps since the last one."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from fedh2l.learner import Learner

LocalGradient = Literal["sum", "displacement", "difference"]
"""What counts as the local gradient where there are several local steps: `FedH2L.local_gradient`."""


def remember(node: Learner, gradient: Tensor, kind: LocalGradient, latest: bool = False) -> None:
    """Notes the gradient of a local step, before the step is taken; with `latest`, it is all that is noted."""
    memory = node.memory
    if latest:
        memory["g_loc"] = gradient
    elif kind == "sum":
        memory["g_loc"] = memory["g_loc"] + gradient if "g_loc" in memory else gradient
    elif kind == "displacement":
        if "start" not in memory:
            memory["start"] = node.parameters.clone()
    else:
        memory.setdefault("first", gradient)
        memory["last"] = gradient


def recall(node: Learner, interval: int) -> Tensor:
    """g_loc of this mutual step; the next one starts afresh."""
    memory = node.memory
    if "g_loc" in memory:
        return memory.pop("g_loc")
    if "start" in memory:
        return memory.pop("start") - node.parameters
    first, last = memory.pop("first"), memory.pop("last")
    return last if interval == 1 else last - first  # one gradient has no difference: it is used as it is
