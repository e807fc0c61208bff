"""Helper for tests with several threads, with a time limit."""

from __future__ import annotations

import threading
from collections.abc import Callable

LIMIT_S = 60  # time limit of each thread in seconds


def all_end(work: Callable[[int], None], count: int) -> None:
    """Run `work` in `count` threads, and check that all threads end. `work` receives the number of the thread."""
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert not any(thread.is_alive() for thread in threads)
