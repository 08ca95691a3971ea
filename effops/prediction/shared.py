"""Contexts that change something for the whole process, and may be entered by several threads at once."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any


class Shared:
    """A context that the first thread enters and the last one leaves. `make` makes it anew."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self.make, self.lock, self.users = make, threading.Lock(), 0
        self.entered = ExitStack()

    def __enter__(self) -> None:
        with self.lock:
            if self.users == 0:
                self.entered.enter_context(self.make())
            self.users += 1

    def __exit__(self, *exception: object) -> None:
        with self.lock:
            self.users -= 1
            if self.users == 0:
                self.entered.close()
