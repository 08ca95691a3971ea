"""The objects of Python's collector."""

from __future__ import annotations

import sys
import threading

from effops.programs.capture.tracked import tracked


def test_tuples_that_another_thread_builds() -> None:
    """Whoever holds such a tuple while the other thread runs has it fail with SystemError."""
    ends = threading.Event()
    failed = []

    def build() -> None:
        while not ends.is_set():
            try:
                tuple(number for number in range(200))
            except SystemError as error:
                failed.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread = threading.Thread(target=build)
    thread.start()
    try:
        for _ in range(10):
            for _ in tracked():
                pass
    finally:
        ends.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert not failed


def test_what_is_listed() -> None:
    mine, pair = ["a list"], ("a", [], "tuple")
    found = tracked()
    assert any(one is mine for one in found)
    assert not any(one is pair for one in found)
