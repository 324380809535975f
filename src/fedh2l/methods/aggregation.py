"""AGG: every node trains on its own data and all public data."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from fedh2l.methods.independent import Independent


class Aggregation(Independent):
    """AGG: every node trains alone on its private data and all public data.

    It shows the value of the public data without any exchange.
    """

    name: ClassVar[str] = "aggregation"

    local_data: Literal["private+all-public"] = Field(
        "private+all-public", description="Training data of the local step."
    )
