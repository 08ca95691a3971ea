"""What a program holds where a fix stands in it: the largest tensor of the fix, and what each of its turns leaves.

The fix of a loop's turn runs once at full size. What it saves for backward is there once in each turn, and of its
results those that the rest of the program holds at once, as a list of logits that a loss reads.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from effops.prediction.timeline import Allocation, highest
from effops.programs.capture.observed import Call
from effops.programs.large.humps import Found
from effops.programs.large.source.slices import Slice
from effops.programs.large.source.trials import FullSize


def bytes_after(found: Found, one: Slice, taken: FullSize) -> int:
    """The bytes of a finding whose slice is replaced by code that takes so much.

    They are those of the largest tensor, or of all that the turns of a loop leave, as those of the finding are.
    """
    if not found.is_loop:
        return taken.largest_bytes
    turns = len(found.turns)
    left = min(turns * taken.left_bytes, turns * taken.saved_bytes + results_held(found, one))
    return max(taken.largest_bytes, left)


def results_held(found: Found, one: Slice) -> int:
    """The most bytes that the rest of the program holds at once of what a slice makes, in all of its turns."""
    inside = _calls_inside(found, one)
    sites = {call.site for call in inside.values()}
    made = {id(storage): storage for call in inside.values() for storage in (*call.makes, *call.writes)}
    held: list[Allocation] = []
    for storage in made.values():
        outside = [call for call in storage.readers if call.site not in sites]
        is_saved_inside = any(call.in_backward and call.site in sites for call in storage.readers)
        if found.outlives(storage):
            held.append(storage.allocation)
        elif outside and is_saved_inside:  # which tells nothing of how long others hold it
            held.append(replace(storage.allocation, died=max(call.tick for call in outside) + 1))
        elif outside:
            held.append(storage.allocation)
    return highest(held)[0]


def has_turns(found: Found, one: Slice) -> bool:
    """Whether a slice ran more than once: an operator at one place in its code did."""
    sites = Counter((call.site, call.name) for call in _calls_inside(found, one).values())
    return max(sites.values(), default=0) > 1


def _calls_inside(found: Found, one: Slice) -> dict[int, Call]:
    """The operators of a slice in all its turns, from those that make what is large."""
    inside: dict[int, Call] = {}
    waiting = [call for member in found.members for call in member.calls]
    while waiting:
        call = waiting.pop()
        if id(call) not in inside and not call.in_backward and _is_inside(call, one):
            inside[id(call)] = call
            waiting += [reader for storage in (*call.makes, *call.writes) for reader in storage.readers]
    return inside


def _is_inside(call: Call, one: Slice) -> bool:
    lines = [(part.lineno, part.end_lineno or part.lineno) for part in one.statements if hasattr(part, "lineno")]
    for scope in call.scopes:
        if scope.code is not one.scope.code:
            continue
        if scope.instruction == one.scope.instruction or any(a <= scope.place.line <= b for a, b in lines):
            return True
    return False
