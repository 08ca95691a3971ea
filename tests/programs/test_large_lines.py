"""`effops.lint` on the corpus at the sizes of the sources, on blocks, in threads, and on what it cannot follow."""

from __future__ import annotations

import copy
import gc
import json
import math
import pickle
import resource
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Distribution

import effops
from effops.programs.capture.assumed_values import CannotFollow
from effops.programs.large.findings import Finding, LintReport

from ..test_corpus import NAMED, recall

SLOW = {  # thousands of chunks or rows at the sizes of the source
    "attention_of_chunks",
    "batch_jacobian",
    "kernel_sums",
    "messages_in_chunks",
    "sigmoid_loss",
}
FEWER = {"crf_normaliser": {"steps": 100}, "decode_states": {"length": 256}}  # steps, each as large as in the source


def sizes_of(program: Any) -> dict[str, int]:
    return program.small if program.name in SLOW else {**program.sizes, **FEWER.get(program.name, {})}


def of_program(program: Any) -> LintReport:
    return effops.lint(lambda: program.run(*program.arguments(**sizes_of(program))), fixes=False)


def told_bytes(finding: Finding, program: Any, expected: Any) -> int:
    """The bytes that a finding tells of the expected line; 0 if it does not name the line."""
    return max(recall.bytes_of(finding, *recall.line_of(program, expected)), default=0)


@pytest.mark.slow
@pytest.mark.parametrize("program", NAMED)
def test_corpus(program: Any) -> None:
    report = of_program(program)
    sizes = sizes_of(program)
    for one in program.expected:
        told = max((told_bytes(finding, program, one) for finding in report.findings), default=0)
        assert told == pytest.approx(one.now(sizes), rel=0.005), one.line
    for finding in report.findings:
        assert any(told_bytes(finding, program, one) for one in program.expected), f"not expected: {finding}"


def distances(a: Tensor, b: Tensor) -> Tensor:
    differences = a[:, None] - b
    return differences.square().sum(-1)


@pytest.mark.parametrize("validates", [True, False])
@pytest.mark.parametrize("positions", [512, 65536])
def test_the_package_power_spherical(positions: int, validates: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 65,536 positions the product has 512 GiB; the run takes neither memory nor time for it."""
    package = pytest.importorskip("power_spherical")
    monkeypatch.setattr(Distribution, "_validate_args", validates)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def score() -> Tensor:
        loc, x = torch.randn(128, positions, 128), torch.randn(128, 1, positions, 128)
        return package.PowerSpherical(loc, torch.rand(128, positions)).log_prob(x)

    report = effops.lint(score, fixes=False)
    (found,) = report.findings
    assert found.library is not None
    assert found.library.source == "self.loc * value"
    assert "log_prob(x)" in found.place.source
    assert found.now_bytes == 4 * 128 * 128 * 128 * positions
    assert found.after_bytes == 4 * 128 * 128 * positions
    assert 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident) < 200 * 2**20
    assert any("checks are taken to hold" in what for what in report.assumed) is validates


def test_a_block() -> None:
    a, b = torch.randn(2000, 64, requires_grad=True), torch.randn(2000, 64)
    with effops.lint(fixes=False) as report:
        assert not report.findings
        loss = distances(a, b).min(-1).values.sum()
        loss.backward()
        assert str(report) == "nothing is found before the block ends: print the report behind it"
    assert "1 finding" in str(report)
    (found,) = report.findings
    assert found.place.source == "a[:, None] - b"
    assert found.kept_bytes == found.now_bytes == 4 * 2000 * 2000 * 64
    assert a.grad is None
    assert torch.isfinite(a.sum())


def test_small_is_not_named() -> None:
    a = torch.randn(100, 64)
    assert not effops.lint(distances, a, a).findings
    assert effops.lint(distances, a, a, least="1 MiB", fixes=False).findings
    assert not effops.lint(distances, a, a, least="1 MiB", times=200).findings


def test_other_lines_at_the_peak() -> None:
    def step(points: Tensor, centres: Tensor, x: Tensor) -> Tensor:
        kept = x + 1
        distances = (points[:, None] - centres).square().sum(-1)
        return distances.amin(1).sum() + kept.sum()

    report = effops.lint(step, torch.empty(2048, 16), torch.empty(1024, 16), torch.empty(2**24), fixes=False)
    assert [one.place.source for one in report.findings if one.place] == ["points[:, None] - centres"]
    assert {place.source: held for place, held in report.others.items()} == {"x + 1": 2**26}
    assert "other lines that hold much at the peak:\n  64.0 MiB  " in str(report)
    assert [one["bytes"] for one in report.to_json()["others"]] == [2**26]
    report = effops.lint(step, torch.empty(8192, 16), torch.empty(1024, 16), torch.empty(2**24), fixes=False)
    assert not report.others  # less than a tenth


def test_what_a_loop_reads_part_by_part() -> None:
    """A turn could make its part. What a product, a caller or other turns have made is given to the loop."""

    def crf(emissions: Tensor, transitions: Tensor) -> Tensor:
        potentials = emissions[:, :, None, :] + transitions
        alpha = emissions[:, 0]
        for step in range(potentials.shape[1]):
            alpha = torch.logsumexp(alpha.unsqueeze(2) + potentials[:, step], dim=1)
        return alpha.logsumexp(1)

    def recurrent(x: Tensor, inner: nn.Linear) -> Tensor:
        inputs, states = inner(x), x.new_zeros(*x.shape[:2], 64)
        for step in range(x.shape[1]):
            states[:, step] = inputs[:, step].tanh()[:, :64]
        total = x.new_zeros(len(x))
        for step in range(x.shape[1]):
            total = total + states[:, step].mean(-1)
        return total

    for wanted in (False, True):
        args = torch.empty(8, 64, 128, requires_grad=wanted), torch.empty(128, 128, requires_grad=wanted)
        report = effops.lint(crf, *args, fixes=False)
        assert [one.place.source for one in report.findings if one.place] == ["emissions[:, :, None, :] + transitions"]
        assert report.findings[0].now_bytes == 4 * 8 * 64 * 128 * 128
    assert not effops.lint(recurrent, torch.empty(8, 256, 8), nn.Linear(8, 512), least="1 MiB").findings
    given = torch.empty(8, 64, 128, 128)
    assert not effops.lint(lambda: sum(given[:, step].amax(-1).sum() for step in range(64))).findings


def test_a_line_that_is_accepted() -> None:
    def nearest(points: Tensor, centres: Tensor) -> Tensor:
        squares = (points[:, None] - centres).square()
        products = (points[:, None] * centres).sum(-1)  # effops: accept
        for _ in (points[:, None] + centres).sum(-1)[:1]:  # effops: accept, as a batch is small
            squares = squares * 1
        return squares.sum(-1) + products

    report = effops.lint(nearest, torch.empty(4096, 16), torch.empty(1024, 16), fixes=False)
    assert [one.place.source for one in report.findings if one.place] == ["points[:, None] - centres"]
    accepted = [one.place.source for one in report.accepted if one.place]
    assert accepted == ["points[:, None] * centres", "points[:, None] + centres"]
    assert str(report).count("\naccepted: ") == 2
    assert report.github().count("::warning") == 1
    assert len(report.to_json()["accepted"]) == 2


def test_a_fix_is_code_that_ran() -> None:
    a, b = torch.randn(2000, 64), torch.randn(2000, 64)
    (found,) = effops.lint(distances, a, b).findings
    assert found.fix is not None
    assert found.fix.after_bytes == found.after_bytes <= found.now_bytes / 8
    some, others = torch.randn(5, 64), torch.randn(7, 64)
    scope = {"a": some, "b": others, "torch": torch}
    assert found.fix.function()(*(scope[name] for name in found.fix.names)).shape == (5, 7)


def test_formats() -> None:
    a = torch.randn(2000, 64)
    report = effops.lint(distances, a, a, fixes=False)
    content = json.loads(json.dumps(report.to_json()))
    assert content["findings"][0]["now_bytes"] == 4 * 2000 * 2000 * 64
    assert content["findings"][0]["place"]["line"] == distances.__code__.co_firstlineno + 1
    (line,) = report.github().splitlines()
    assert line.startswith("::warning file=")
    assert "%0A" in line
    text = str(report)
    assert "976.6 MiB now, 15.3 MiB after" in text
    assert "(2000, 1, 64) - (2000, 64) -> (2000, 2000, 64)" in text


def test_a_branch_on_a_value_is_named() -> None:
    def branches(x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x

    with pytest.raises(CannotFollow, match=r"lint: a branch on a value .*x\.sum\(\) > 0"):
        effops.lint(branches, torch.randn(10_000))


def test_a_branch_on_a_number_is_shown() -> None:
    """The true branch was never run, and a line among others at the end was all that told so."""

    def branches(x: Tensor) -> Tensor:
        loss = x.square().mean()
        best = 2 * loss.item() + 1
        if best > 5:
            return distances(x, x)
        return loss if math.isnan(best) else -loss

    report = effops.lint(branches, torch.randn(10_000, 64))
    (place,) = report.unseen
    assert place.line == branches.__code__.co_firstlineno + 3
    assert not report.findings
    text = str(report)
    assert f"comparisons with them are false:\n  {place}: if best > 5:" in text
    assert text.index("only one branch") < text.index("assumed: numbers that are read are taken to be NaN at ")
    assert report.github().startswith("::notice file=")
    assert f"line={place.line}," in report.github()
    assert report.to_json()["unseen"] == [{"file": place.file, "line": place.line, "source": "best > 5"}]


def test_a_branch_on_a_tensor_as_a_number_is_shown() -> None:
    def branches(x: Tensor) -> Tensor:
        if float(x.sum()) > 5:
            return -x
        return x

    (place,) = effops.lint(branches, torch.randn(10_000)).unseen
    assert place.line == branches.__code__.co_firstlineno + 1


def test_a_number_that_is_read_is_a_plain_one_elsewhere() -> None:
    def reads(x: Tensor) -> list[float]:
        return [x.sum().item(), -x.sum().item(), round(x.sum().item(), 3)]

    with effops.lint():
        numbers = reads(torch.randn(10_000, 64))
    assert all(math.isnan(one) for one in numbers)
    assert json.dumps(numbers[0]) == "NaN"
    assert type(copy.deepcopy(numbers)[0]) is type(numbers[0])
    assert type(pickle.loads(pickle.dumps(numbers[0]))) is float


def test_layers_after_scores_that_are_small() -> None:
    """Rows of scores counted as rows of a product with a parameter, so that the layers of a vision model were named."""
    layers = [nn.Linear(768, 768) for _ in range(4)]
    first, second = nn.Linear(768, 3072), nn.Linear(3072, 768)

    def block(x: Tensor) -> Tensor:
        q, k, v = (one(x).view(32, 197, 12, 64).transpose(1, 2) for one in layers[:3])
        x = x + layers[3](((q @ k.mT) / 8).softmax(-1).matmul(v).transpose(1, 2).reshape(x.shape))
        return second(nn.functional.gelu(first(x))).mean()

    assert not effops.lint(block, torch.randn(32, 197, 768), fixes=False).findings


def test_operators_that_create_tensors_read_none() -> None:
    """`new_zeros` was told as what reads the values of edges."""
    x, index = torch.randn(10_000, 128), torch.randint(10_000, (400_000,))

    def summed(x: Tensor, index: Tensor) -> Tensor:
        values = x[index].sigmoid()
        counts = values.new_zeros(10_000)
        sums = values.new_zeros(10_000, 128).index_add_(0, index, values)
        return sums / (1 + counts[:, None])

    (found,) = effops.lint(summed, x, index, fixes=False).findings
    assert found.reducer.startswith("index_add_")
    assert found.after_bytes == 4 * 10_000 * 128


def overlap_costs(boxes: Tensor, others: Tensor) -> Tensor:
    """A result of all pairs, of which a dozen more are held: what lint named before were larger ones alone."""
    mine, yours = boxes[:, None], others
    inner = (torch.min(mine[..., 2:], yours[:, 2:]) - torch.max(mine[..., :2], yours[:, :2])).clamp(min=0)
    outer = (torch.max(mine[..., 2:], yours[:, 2:]) - torch.min(mine[..., :2], yours[:, :2])).clamp(min=0)
    return inner.prod(-1) / outer.prod(-1)


@pytest.mark.slow
def test_what_is_held_for_a_result_of_all_pairs() -> None:
    boxes = torch.rand(4000, 4)
    (found,) = effops.lint(overlap_costs, boxes, boxes).findings
    first = overlap_costs.__code__.co_firstlineno + 3
    assert {first, first + 1} <= {place.line for place in found.lines}
    assert found.now_bytes == 2 * found.after_bytes == 2 * 4 * 4000**2
    assert found.fix is not None
    assert found.fix.how == "tiles"


def test_results_of_all_pairs_that_hold_little() -> None:
    a = torch.randn(4000, 1)
    b = torch.randn(4000, 64, requires_grad=True)
    assert not effops.lint(lambda: (a - a.mT).square().neg().exp()).findings
    assert not effops.lint(lambda: (b @ b.mT / 8).softmax(-1)).findings

    def several() -> list[Tensor]:  # each is returned
        results = [a - a.mT]
        for _ in range(12):
            results.append(results[-1] * 2)
        return results

    assert not effops.lint(several).findings


def test_what_layers_keep_for_a_result_as_large_as_what_they_are_given() -> None:
    """A residual stream of many layers is as large as its input, and is no hump."""

    def stream(x: Tensor) -> Tensor:
        for _ in range(12):
            x = x + x.sigmoid() * x.tanh()
        return x

    assert not effops.lint(stream, torch.randn(2048, 2048, requires_grad=True)).findings


def test_arguments() -> None:
    with pytest.raises(ValueError, match="lint: `least`: expected a number"):
        effops.lint(distances, torch.ones(2, 2), torch.ones(2, 2), least="much")
    with pytest.raises(TypeError, match="lint: `times` must be a number; got str '8'"):
        effops.lint(torch.exp, torch.randn(3), times="8")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="lint: `times` must be above 1; got 1"):
        effops.lint(distances, torch.ones(2, 2), torch.ones(2, 2), times=1)


def test_two_threads() -> None:
    """Each finds its own; a third one trains beside them, for real."""
    a = torch.randn(2000, 64)
    found: dict[int, LintReport] = {}
    model = nn.Linear(8, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    x = torch.randn(16, 8)

    def look(number: int) -> None:
        found[number] = effops.lint(distances, a[: 1000 + 500 * number], a, fixes=False)

    threads = [threading.Thread(target=look, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    for thread in threads:
        thread.join()
    assert losses[-1] < losses[0]
    assert [found[number].findings[0].now_bytes for number in range(2)] == [4 * n * 2000 * 64 for n in (1000, 1500)]


def fakes() -> set[int]:
    return {id(one) for one in gc.get_objects() if issubclass(type(one), torch._subclasses.FakeTensor)}


def test_nothing_stays() -> None:
    a = torch.randn(2000, 64, requires_grad=True)
    before = fakes()
    effops.lint(distances, a, a)
    gc.collect()
    assert fakes() <= before
    assert a.grad is None
    assert a._version == 0


def test_tensors_that_a_transform_has_left_behind() -> None:
    """One that vmap had left in a list raised at `detach`, in every run after it."""
    left: list[Tensor] = []
    torch.func.vmap(lambda x: left.append(x) or x)(torch.ones(2, 3))
    torch.func.grad(lambda x: left.append(x) or x.sum())(torch.ones(3))
    a = torch.randn(2000, 64)
    assert effops.lint(distances, a, a, fixes=False).findings
    assert len(left) == 2


def test_files_that_read_the_same(tmp_path: Path) -> None:
    """Code of two files is equal if it reads the same, and the second was told as the first."""
    a = torch.randn(2000, 64)
    for name in ("one.py", "other.py"):
        path = tmp_path / name
        path.write_text("def differ(a, b):\n    return (a[:, None] - b).square().sum(-1)\n")
        scope: dict[str, Any] = {}
        exec(compile(path.read_text(), str(path), "exec"), scope)
        (found,) = effops.lint(scope["differ"], a, a, fixes=False).findings
        assert str(found.place) == f"{path}:2"
