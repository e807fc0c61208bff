"""Threads of a test that all have to end."""

from __future__ import annotations

import threading
from collections.abc import Callable

LIMIT_S = 60  # of each


def all_end(work: Callable[[int], None], count: int) -> None:
    """work is given its thread's number."""
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert not any(thread.is_alive() for thread in threads)
