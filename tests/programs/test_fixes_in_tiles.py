"""`effops.tiled` is proposed where no named op and no contraction is: it was run, and takes less."""

import inspect

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import effops
from effops.programs.large import proposals
from effops.programs.large.in_tiles import in_tiles

from .test_fixes import fixes, normal, outcome

pytestmark = pytest.mark.usefixtures("one_thread")


def leaky(left, right, weight):
    """Scores of graph attention: no named op has this function between sum and product."""
    scores = F.leaky_relu(left[:, None] + right, 0.2)
    return (scores * weight).sum(-1).softmax(-1)


def of_other_names(left, right, weight):
    left = left * 2
    return (F.softplus(left[:, None] + right) * weight).sum(-1).amax(1)


class Scores(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(24, 24).double(), nn.Linear(24, 24).double()
        self.weight = nn.Parameter(normal(24, grad=False))

    def forward(
        self,
        x,
        y,
    ):
        """A docstring, which is not run."""
        left, right = self.left(x), self.right(y)
        return (F.softplus(left[:, None] + right) * self.weight).sum(-1)


def pair(left, right, weight):
    return F.softplus(left[:, None] + right) * weight


def in_two_functions(left, right, weight):
    return pair(left, right, weight).sum(-1).amax(1)


def drawing(left, right, weight):
    """It would draw as many numbers in a trial, which are random."""
    left = left + torch.randn(1600, 24, dtype=torch.float64)
    return (F.softplus(left[:, None] + right) * weight).sum(-1).amax(1)


def printing(left, right, weight):
    sums = (F.softplus(left[:, None] + right) * weight).sum(-1)
    print(sums.shape)
    return sums


def inside(left, right, weight):
    """The inner function is made anew in each call, and would be captured anew: the outer one is cut."""

    def inner():
        return (F.softplus(left[:, None] + right) * weight).sum(-1).amax(1)

    return inner()


class Own(Scores):
    """A method of its own, which a trial does not have."""

    def forward(self, x, y):
        return self.scores(self.left(x), self.right(y)).amax(1)

    def scores(self, left, right):
        return (F.softplus(left[:, None] + right) * self.weight).sum(-1)


def of_pairs():
    return normal(1600, 24), normal(140, 24), normal(24)


def rows():
    return normal(1600, 24, grad=False), normal(140, 24, grad=False)


def in_tiles_of(program, *arguments):
    (found, fix), *_ = fixes(program, *arguments)
    return found, fix, in_tiles(found)


CASES = [
    (leaky, of_pairs, "def leaky(left, right, weight):"),
    (of_other_names, of_pairs, "def of_other_names(left, right, weight):"),
    (Scores(), rows, "def forward(\n    self,\n    x,\n    y,\n):"),
    (in_two_functions, of_pairs, "def in_two_functions(left, right, weight):"),
    (Own(), rows, "def scores(self, left, right):"),
    (inside, of_pairs, "def inside(left, right, weight):"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("program", "arguments", "header"), CASES, ids=[str(one[2]).split()[1] for one in CASES])
def test_function_in_tiles(program, arguments, header):
    torch.manual_seed(0)
    given = arguments()
    found, fix, made = in_tiles_of(program, *given)
    assert made is not None
    code, lines = made.whole.code(made.budget), made.whole.lines
    assert code.endswith(header)
    assert '@effops.tiled(budget="' in code
    file = inspect.getsourcelines(inspect.getmodule(type(program) if isinstance(program, nn.Module) else program))[0]
    assert header.splitlines() == [file[line - 1].rstrip().removeprefix("    " * ("self" in header)) for line in lines]
    assert 2 * made.bytes_after <= found.now_bytes
    assert fix is not None
    if fix.how == "tiles":
        assert fix.code == code
        assert fix.lines == lines
        known = {
            **dict(zip(["left", "right", "weight"], of_pairs())),
            "x": normal(160, 24),
            "y": normal(140, 24),
            "self": program,
        }
        known = {name: known[name] for name in fix.names}
        mended, original = outcome(fix.function(), known), outcome(fix.original(), known)
        assert mended.keys() == original.keys()
        for name, value in original.items():
            torch.testing.assert_close(mended[name], value, rtol=1e-6, atol=1e-9, msg=name)


@pytest.mark.slow
def test_what_was_pasted_is_tiled():
    """The fix as it stands in the report, in the user's own file, keeps its budget."""
    given = of_pairs()
    _, fix, made = in_tiles_of(leaky, *given)
    assert fix.how == "tiles", fix.code
    code, lines = made.whole.code(made.budget), made.whole.lines
    source = "".join(inspect.getsourcelines(leaky)[0][len(lines) :])
    namespace = {"F": F, "effops": effops}
    exec(f"{code}\n{source}", namespace)
    taken = effops.explain(namespace["leaky"], *given)
    assert taken.taken_bytes <= made.budget < taken.as_it_is_bytes
    assert made.bytes_after <= made.budget + given[0].shape[0] * given[1].shape[0] * 8


@pytest.mark.slow
@pytest.mark.parametrize("program", [drawing, printing])
def test_what_is_not_certain(program):
    """Then the loop stays, or nothing."""
    _, fix, made = in_tiles_of(program, *of_pairs())
    assert made is None
    assert fix is None or fix.how == "loop"


@pytest.mark.slow
def test_call_of_a_script(tmp_path):
    """There is no `def` to put it above."""
    file = tmp_path / "script.py"
    file.write_text(
        "score = lambda left, right, weight: (F.softplus(left[:, None] + right) * weight).sum(-1).amax(1)\n"
        "found = score(left, right, weight)\n"
    )
    namespace = {"F": F, "torch": torch, **dict(zip(["left", "right", "weight"], of_pairs()))}

    def script():
        exec(compile(file.read_text(), file, "exec"), namespace)
        return namespace["found"]

    _, fix, made = in_tiles_of(script)
    assert made is not None
    first, second = made.whole.code(made.budget).splitlines()
    assert first.startswith("score_in_tiles = effops.tiled(score, budget=")
    assert second.startswith("score_in_tiles(left, right, weight)  # in place of score(left, right, weight)")
    assert fix.how == "tiles"
    given = of_pairs()
    torch.testing.assert_close(fix.function()(*given), fix.original()(*given))


@pytest.mark.slow
def test_the_faster_one_is_proposed(monkeypatch):
    """A loop stays where it takes less time."""
    found, fix, made = in_tiles_of(leaky, *of_pairs())
    assert fix.how == "tiles"
    slow = made._replace(more_seconds=made.more_seconds + 10 * made.seconds)
    monkeypatch.setattr(proposals, "in_tiles", lambda found: slow)
    assert proposals.propose(found).how == "loop"
    monkeypatch.setattr(proposals, "in_tiles", lambda found: None)
    assert proposals.propose(found).how == "loop"


@pytest.mark.parametrize("call", ["lint", "budget"])
def test_tiles_are_followed(call):
    """After the fix the line is not named any more, and a budget counts the tiles."""
    left, right, weight = (one.float().detach().requires_grad_() for one in of_pairs())
    tiled = effops.tiled(leaky, budget="2 MiB")
    if call == "lint":
        assert effops.lint(leaky, left, right, weight, least="16 MiB").findings
        report = effops.lint(tiled, left, right, weight, least="4 MiB")
        assert not report.findings
    else:
        with effops.budget("64 MiB") as report:
            tiled(left, right, weight).sum().backward()
        assert report.peak_bytes <= 2**21 + 2 * 1600 * 140 * 4
