"""AGG: every node trains on its own data and everybody's public data."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from fedh2l.methods.independent import Independent


class Aggregation(Independent):
    """AGG: every node trains on its private data and everybody's public data; nothing crosses after that.

    What sharing public data alone is worth. `independent` with another pool, and nothing else.
    """

    name: ClassVar[str] = "aggregation"

    local_data: Literal["private+all-public"] = Field("private+all-public", description="what a node trains on")
