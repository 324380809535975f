"""Replacements for PyTorch functions while a model runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode

Table = Mapping[Callable[..., Any], Callable[..., Any]]


class FunctionOverrides(TorchFunctionMode):
    """While active, replaces the functions in a table by others."""

    def __init__(self, table: Table) -> None:
        super().__init__()
        self._table = table

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return self._table.get(func, func)(*args, **(kwargs or {}))
