"""All programs of the corpus, each with the name of its half."""

from __future__ import annotations

import importlib
import pkgutil

from .program import Program

HALVES = ("known", "held_out")


def programs() -> tuple[tuple[str, Program], ...]:
    """(half, program), in the order of the modules' names."""
    found: list[tuple[str, Program]] = []
    for half in HALVES:
        package = importlib.import_module(f".{half}", __package__)
        for module in sorted(one.name for one in pkgutil.iter_modules(package.__path__)):
            members = importlib.import_module(f".{module}", package.__name__)
            found += [(half, program) for program in getattr(members, "PROGRAMS", ())]
    return tuple(found)
