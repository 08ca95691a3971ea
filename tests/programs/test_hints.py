"""What is told of a finding without a fix: why there is none, and what takes less in that program."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import effops
from effops.programs.capture.assumed_values import CannotFollow
from effops.programs.large import hints
from effops.programs.large.source import trials


class Score(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.softplus(x) * 0.5


score = Score()


def of_module(x: Tensor, y: Tensor) -> Tensor:
    return score(x[:, None] - y).sum(-1)


def differences(x: Tensor, y: Tensor) -> Tensor:
    return x[:, None] - y


def apart(x: Tensor, y: Tensor) -> Tensor:
    found = differences(x, y).exp()
    print("between")
    return found.sum(-1)


def of_one_size(x: Tensor, y: Tensor) -> Tensor:
    return (x.reshape(512, 64)[:, None] - y).sin().sum(-1)


def in_turns(x: Tensor, y: Tensor) -> Tensor:
    total = torch.zeros(())
    for part in x.split(64):
        total = total + score(part[:, None] - y).amax(-1).sum()
    return total


CHECKPOINT = "`torch.utils.checkpoint` around these lines"
BATCH = "a smaller batch: its bytes are in proportion to the 512 of (512, 400, 64)"
CASES = {
    of_module: (hints.NOT_TRIED, [CHECKPOINT, BATCH]),
    apart: (hints.NOT_TOGETHER, [CHECKPOINT, BATCH]),
    of_one_size: (hints.NOT_TRIED, ["`effops.tiled` of `of_one_size`", CHECKPOINT, BATCH]),
    in_turns: (hints.NOT_TRIED, ["`torch.utils.checkpoint` around each turn"]),
}


@pytest.mark.parametrize("program", CASES, ids=lambda one: one.__name__)
@pytest.mark.parametrize("differentiable", [True, False])
def test_no_fix(program, differentiable):
    x, y = torch.randn(512, 64, requires_grad=differentiable), torch.randn(400, 64)
    finding = effops.lint(program, x, y, least="1 MiB").findings[0]
    assert finding.fix is None
    why, remedies = CASES[program]
    assert str(finding).splitlines()[-1] == f"  {finding.hint}"
    assert finding.to_json()["hint"] == finding.hint
    assert finding.hint.startswith(f"no fix: {why}")
    for one in remedies:  # nothing is kept for backward where there is none
        assert (one in finding.hint) is (differentiable or "checkpoint" not in one)
    for one in (CHECKPOINT, BATCH, "effops.tiled"):
        assert one in finding.hint or not any(told.startswith(one) for told in remedies) or not differentiable
    assert ("effops.tiled" in finding.hint) is (program is of_one_size)
    assert not effops.lint(program, x, y, least="1 MiB", fixes=False).findings[0].hint


def test_a_parameter_is_no_batch():
    weight = nn.Parameter(torch.randn(512, 64))

    def scores(y: Tensor) -> Tensor:
        return score(weight[:, None] - y).sum(-1)

    finding = effops.lint(scores, torch.randn(400, 64), least="1 MiB").findings[0]
    assert finding.fix is None
    assert "batch" not in finding.hint


def test_no_trial_runs_at_the_sizes_of_the_program(monkeypatch):
    """A function that takes no smaller sizes was run at its own for `tiled`: 12 GiB where lint takes none."""
    made = []
    real = trials.real
    monkeypatch.setattr(trials, "real", lambda found, sizes, *more: made.append(sizes) or real(found, sizes, *more))
    x, y = torch.randn(512, 64, requires_grad=True), torch.randn(4000, 64)
    effops.lint(of_one_size, x, y)
    assert made
    assert all(made)


big = torch.randn(5000, 3)  # of which no value is known
REMEDIES = {  # what cannot be followed, what its error says, and what it says to write
    "big.sum(-1).tolist()": ("[one.item() for one in x.flatten()]", "[one.item() for one in big.sum(-1).flatten()]"),
    "big.sum(-1).numpy()": ("[one.item() for one in x.flatten()]", "[one.item() for one in big.sum(-1).flatten()]"),
    "1 if big.sum() > 0 else 2": ("compare `x.item()`", "1 if big.sum().item() > 0 else 2"),
    "big.repeat_interleave(1 + (big[:, 0] > 0), 0)": (
        "output_size=",
        "big.repeat_interleave(1 + (big[:, 0] > 0), 0, output_size=20_000)",
    ),
}


@pytest.mark.parametrize("source", REMEDIES)
def test_a_remedy_helps(source):
    """That of `.tolist()` was to use tensors, which does not help a program that needs numbers."""
    remedy, written = REMEDIES[source]
    with pytest.raises(CannotFollow) as raised:
        effops.lint(lambda: eval(source))
    assert remedy in str(raised.value)
    effops.lint(lambda: eval(written))
