"""Helper for running threads of a test and checking their end."""

from __future__ import annotations

import threading
from collections.abc import Callable

LIMIT_S = 60  # for each thread


def run_threads(work: Callable[[int], None], count: int) -> None:
    """Run `work` in `count` threads, each with the thread number as the argument, and check that all threads end."""
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert not any(thread.is_alive() for thread in threads)
