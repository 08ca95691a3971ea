"""Named ops are proposed for the branches that were run, and the fix is right for calls that take other ones."""

import ast

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from .test_fixes import fixes, normal, outcome

BATCH, HEADS, LENGTH, WIDTH = 4, 3, 176, 12
pytestmark = pytest.mark.usefixtures("one_thread")  # blocks of several threads are most of a tensor of these sizes


def eager(query, key, value, mask, scaling):
    """Numbers are added, as in transformers."""
    weights = torch.matmul(query, key.transpose(2, 3)) * scaling
    if mask is not None:
        weights = weights + mask
    weights = F.softmax(weights, dim=-1)
    return torch.matmul(weights, value)


def filled(q, k, v, mask):
    scores = q @ k.transpose(-2, -1)
    if mask is not None:
        scores = scores.masked_fill(mask == 0, float("-inf"))
    return scores.softmax(-1) @ v


def filled_or_not(q, k, v, mask):
    scores = q @ k.transpose(-2, -1)
    if mask is None:  # noqa: SIM108
        scores = scores * 0.5
    else:
        scores = (scores * 0.5).masked_fill(mask == 0, float("-inf"))
    return scores.softmax(-1) @ v


def shortened(q, k, v, mask):
    """A statement among those of the branch makes a name."""
    scores = q @ k.transpose(-2, -1)
    if mask is not None:
        part = mask[:, : k.shape[-2]]
        scores = scores.masked_fill(part == 0, float("-inf"))
    return scores.softmax(-1) @ v


def many_or_few(q, k, v, mask):
    """The condition compares numbers: it may hold in a program, and not in a trial."""
    scores = q @ k.transpose(-2, -1)
    if mask.shape[-1] > 100:
        scores = scores.masked_fill(mask == 0, float("-inf"))
    return scores.softmax(-1) @ v


def assigned_before(q, k, v, mask):
    """What the condition asks for is made by the statements themselves."""
    scores = q @ k.transpose(-2, -1)
    mask = None if mask.shape[-1] > 100 else mask
    if mask is not None:
        scores = scores.masked_fill(mask == 0, float("-inf"))
    return scores.softmax(-1) @ v


class Flags(nn.Module):
    def __init__(self, causal=True, halved=False):
        super().__init__()
        self.causal, self.halved = causal, halved

    def forward(self, q, k, v):
        n = q.shape[-2]
        scores = q @ k.transpose(-2, -1)
        if self.causal:
            mask = torch.ones(n, n, dtype=torch.bool).tril()
            scores = scores.masked_fill(~mask, float("-inf"))
        return scores.softmax(-1) @ v


class Nested(Flags):
    def forward(self, q, k, v, mask=None):
        scores = q @ k.transpose(-2, -1)
        if mask is not None:
            if not self.halved:
                scores = scores * 0.5
            scores = scores.masked_fill(mask == 0, float("-inf"))
        return scores.softmax(-1) @ v


def heads():
    return [normal(BATCH, HEADS, LENGTH, 4) for _ in range(3)]


def lower():
    return torch.ones(LENGTH, LENGTH, dtype=torch.float64).tril()


def bias():
    return torch.where(lower() > 0, 0.0, float("-inf")).double()


CASES = [
    (eager, [bias(), 0.5], "query, key, value, attn_mask=mask, scale=scaling)", [None, 0.5]),
    (filled, [lower()], "q, k, v, attn_mask=mask != 0 if mask is not None else None, scale=1.0)", [None]),
    (filled, [None], "if mask is None:\n    return effops.attention(q, k, v, scale=1.0)\nelse:", [lower()]),
    (
        filled_or_not,
        [lower()],
        "if mask is not None:\n    return effops.attention(q, k, v, attn_mask=mask != 0",
        [None],
    ),
    (shortened, [lower()], "if mask is not None:\n    part = mask", [None]),
    (Flags(), [], "q, k, v, is_causal=self.causal, scale=1.0)", []),
    (Nested(), [lower()], "if mask is not None and (not self.halved):", [None]),
]


def name_of(program):
    return getattr(program, "__name__", type(program).__name__)


def is_named(fix):
    return fix is not None and fix.how == "named op"


def same(fix, given):
    mended, original = outcome(fix.function(), given), outcome(fix.original(), given)
    assert mended.keys() == original.keys()
    for name, value in original.items():
        torch.testing.assert_close(mended[name], value, rtol=1e-6, atol=1e-9, msg=f"{name}: {fix.code}")


@pytest.mark.parametrize(("program", "more", "code", "other"), CASES, ids=[name_of(one[0]) for one in CASES])
def test_branch_that_was_run(program, more, code, other):
    torch.manual_seed(0)
    found, fix = fixes(program, *heads(), *more)[0]
    assert is_named(fix)
    assert code in fix.code
    assert 2 * fix.after_bytes <= found.now_bytes
    ast.parse(f"def function():\n{''.join(f'    {line}' for line in fix.code.splitlines(keepends=True))}")
    forward = getattr(program, "forward", program)
    names = [name for name in forward.__code__.co_varnames[: forward.__code__.co_argcount] if name != "self"]
    for rest in (more, other):  # of this call, and of one that takes other branches
        known = {**dict(zip(names, [*heads(), *rest])), "self": program, "n": LENGTH}
        same(fix, {name: known[name] for name in fix.names})
    if isinstance(program, Flags):
        for causal, halved in ((False, True), (True, True)):
            known["self"] = Flags(causal, halved)
            same(fix, {name: known[name] for name in fix.names})


@pytest.mark.slow
@pytest.mark.parametrize("program", [many_or_few, assigned_before], ids=name_of)
def test_branch_that_cannot_be_told(program):
    assert not is_named(fixes(program, *heads(), lower())[0][1])
