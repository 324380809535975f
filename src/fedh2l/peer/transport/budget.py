"""Limit on the calls of one certificate."""

from __future__ import annotations

import threading
import time

RATE, BURST = 1000.0, 5000.0
"""Calls per second that are answered, and calls that may come at once. A member makes about one call per round, and
two small networks do some hundred rounds per second."""
REFUSED_CALL, STRANGER = 20.0, 200.0
"""Calls that a refused call of a member counts for, and a call that is not of a member."""
BANNED = 30.0
"""Seconds for which calls are not answered when there were too many."""
MOST = 10_000
"""Certificates that are counted. Above it, all counts are reset."""


class CallBudgets:
    """A token bucket for each certificate. An overdrawn one is in debt, and pays it back in `BANNED` seconds."""

    def __init__(self) -> None:
        self._left: dict[bytes, tuple[float, float]] = {}
        """Calls left of each certificate, and the time of this count."""
        self._lock = threading.Lock()

    def spend(self, who: bytes, cost: float) -> bool:
        """Count a call. Return whether there were too many."""
        now = time.monotonic()
        with self._lock:
            if len(self._left) > MOST:
                self._left.clear()
            left, when = self._left.get(who, (BURST, now))
            left = min(BURST, left + (now - when) * RATE)
            if left >= 0 and left < cost:
                left = -BANNED * RATE
            elif left >= 0:
                left -= cost
            self._left[who] = (left, now)
            return left < 0
