"""SIGINT and SIGTERM as requests: noted at once, obeyed at the end of a step, when everything can be saved."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Stopped = Callable[[], int]
"""Says which signal asked this process to stop, or 0."""


class Interrupted(Exception):
    """The run was told to stop; everything is saved, the same command goes on."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.exit_code = 128 + signum


@contextmanager
def stop_signals() -> Iterator[Stopped]:
    """Within it, SIGINT and SIGTERM are noted instead of obeyed; the function says which came, or 0.

    A second SIGINT is obeyed at once. Outside the main thread signals are left alone.
    """
    seen: list[int] = []

    def note(signum: int, frame: object) -> None:
        seen.append(signum)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    if threading.current_thread() is not threading.main_thread():
        yield lambda: 0
        return
    before = {s: signal.signal(s, note) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: seen[0] if seen else 0
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
