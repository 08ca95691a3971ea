"""The fix of a finding is code: it runs, its results and gradients are those of the user's own, and it makes less."""

import ast
import inspect
import math
import runpy
import textwrap
from typing import Any

import pytest
import torch
from torch import distributions, nn
from torch.nn import functional

import effops
from effops.measure import tensors_of
from effops.programs.capture.faked import faked
from effops.programs.capture.observed import Observed
from effops.programs.large import humps, proposals
from effops.programs.large.proposals import propose
from effops.pytorch.calls import FakeTensor

LEAST = 2**15


def fixes(program, *arguments):
    observed = Observed(scope_bytes=2**10)
    with faked("lint", observed, probe=False):
        results = tensors_of(program(*arguments))
        returned = [observed.storage_of(one) for one in results if isinstance(one, FakeTensor)]
        end = observed.recorder.tick
        if any(one.requires_grad for one in results):
            torch.autograd.backward([one.sum() for one in results if one.requires_grad])
    return [(found, propose(found)) for found in humps.find(observed, returned, end, LEAST)]


def normal(*shape, grad=True):
    return torch.randn(shape, dtype=torch.float64).requires_grad_(grad)


def dot(loc, x):
    products = loc * x.unsqueeze(1)
    return products.sum(-1)


def weighted(gains, phases):
    return (gains[..., None] * phases.unsqueeze(-2)).sum(-3)


def copied(one, other):
    return torch.matmul(one, other)


def distances(points, centres):
    return ((points[:, None] - centres) ** 2).sum(-1).sqrt()


def coordinates(points, others):
    return (points[:, None] - others[None]).norm(dim=-1).amin(1)


def absolute(points, others):
    return (points[:, None] - others).abs().sum(-1)


def cosine(one, other):
    return functional.cosine_similarity(one[:, None], other, dim=-1) / 0.1


def attended(q, k, v, mask):
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    return torch.softmax(scores.masked_fill(~mask, -math.inf), dim=-1) @ v


def additive(query, key, weight):
    return (torch.tanh(query.unsqueeze(2) + key.unsqueeze(1)) * weight).sum(-1)


def density(loc, scale, x):
    return distributions.Independent(distributions.Normal(loc, scale), 1).log_prob(x[:, None])


def mixture(logits, loc, scale, x):
    components = distributions.Independent(distributions.Normal(loc, scale), 1)
    mixed = distributions.MixtureSameFamily(distributions.Categorical(logits=logits), components)
    return mixed.log_prob(x)


def mixture_made_elsewhere(mixed, x):
    return -mixed.log_prob(x).mean()


class Density(nn.Module):
    def __init__(self, mixed):
        super().__init__()
        self.mixed = mixed

    def forward(self, x):
        mixed = self.distribution()
        return -mixed.log_prob(x).mean()

    def distribution(self):
        return self.mixed


def mixture_made_by_a_method(density, x):
    return density(x)


def mixed_normals():
    components = distributions.Independent(distributions.Normal(normal(140, 24), normal(140, 24).exp()), 1)
    return distributions.MixtureSameFamily(distributions.Categorical(logits=normal(140)), components)


def path(a, b, c):
    return torch.einsum("ij,jk,kl,jk->il", a, b, c, b)


def embedded(numbers, table):
    return functional.one_hot(numbers, len(table)).double() @ table


def head(hidden, weight, targets):
    logits = hidden @ weight.mT
    return functional.cross_entropy(logits, targets)


def head_of_a_layer(layer, hidden, targets):
    logits = layer(hidden)
    return functional.cross_entropy(logits, targets)


def next_positions(layer, hidden, targets):
    logits = layer(hidden)
    before = logits[:, :-1].contiguous()
    return functional.cross_entropy(before.view(-1, before.size(-1)), targets[:, 1:].reshape(-1), ignore_index=0)


def classes_second(layer, hidden, targets, criterion):
    logits = layer(hidden)
    return criterion(logits.transpose(1, 2), targets)


def smoothed(layer, hidden, targets, criterion):
    logits = layer(hidden)
    return criterion(logits, targets)


def printed(loc, x):
    print(f"{(loc * x.unsqueeze(1)).sum(-1).mean():.3f}", flush=True)


def stored(loc, x, losses):
    products = loc * x.unsqueeze(1)
    losses.append(products.sum(-1).mean())


def differentiated(loc, x):
    (loc * x.unsqueeze(1)).sum(-1).mean().backward()


def read_as_a_number(points):
    return torch.sigmoid(points[:, None] * points + points[:, None]).sum(-1).amax().item()


def printed_of_pairs(points):
    print(torch.sigmoid(points[:, None] * points + points[:, None]).sum(-1).amax(1))


def leaky(left, right, attention):
    scores = (functional.leaky_relu(left[:, None] + right, 0.2) * attention).sum(-1)
    return scores.softmax(1) @ right


def triplets(d, margin):
    losses = functional.relu(d[:, :, None] - d[:, None] + margin)
    return losses.sum() / (losses > 0).sum()


def pairs_of_one(points):
    return torch.sigmoid(points[:, None] * points + points[:, None]).sum(-1).amax(1)


def templates(image, template):
    windows = image.unfold(0, 9, 1)
    found = -2 * torch.einsum("ij,j->i", windows.cos(), template)
    found += torch.einsum("ij,ij->i", windows, windows.sin())
    return found


def in_chunks(images, texts):
    loss = -(images * texts).sum()
    for part in images.split(8):
        loss = loss + functional.softplus(part @ texts.mT).sum()
    return loss / len(images)


NAMED, CONTRACTION, LIBRARY, LOOP = "named op", "contraction", "library function", "loop"
CASES = [
    (dot, lambda: (normal(20, 33, 24), normal(18, 33, 24)[:, :]), NAMED, "effops.broadcast_dot(loc, x.unsqueeze(1))"),
    (weighted, lambda: (normal(4, 24, 14), normal(4, 24, 40)), CONTRACTION, "torch.einsum('abcd,abcd->acd', "),
    (copied, lambda: (normal(64, 3, 1, 20), normal(1, 3, 20, 17)), CONTRACTION, "'abcd,abde->abce', one, other)"),
    (distances, lambda: (normal(90, 24), normal(70, 24)), CONTRACTION, "'abc,bc->ab', points[:, None], centres)"),
    (
        additive,
        lambda: (normal(2, 133, 24), normal(2, 131, 24), normal(24)),
        NAMED,
        "additive_attention_scores(query, key",
    ),
    (
        density,
        lambda: (normal(140, 24), normal(140, 24).exp().detach(), normal(260, 24)),
        NAMED,
        "normal_log_prob(loc, ",
    ),
    (
        mixture,
        lambda: (normal(140), normal(140, 24), normal(140, 24).exp().detach(), normal(260, 24)),
        NAMED,
        "effops.distributions.Mixture(",
    ),
    (cosine, lambda: (normal(60, 24), normal(70, 24)), NAMED, "functional.normalize(one[:, None], dim=-1)"),
    (
        attended,
        lambda: (*(normal(2, 99, 8) for _ in range(3)), torch.ones(99, 99, dtype=torch.bool).tril()),
        NAMED,
        "effops.attention(q, k, v, attn_mask=mask",
    ),
    (path, lambda: (normal(24, 24), normal(24, 24), normal(24, 24)), CONTRACTION, "torch.einsum('"),
    (coordinates, lambda: (normal(90, 3), normal(80, 3)), LIBRARY, "torch.cdist(points, others, compute_mode="),
    (absolute, lambda: (normal(90, 24), normal(80, 24)), LIBRARY, "torch.cdist(points, others, p=1.0)"),
    (embedded, lambda: (torch.arange(128) % 64, normal(64, 4)), LIBRARY, "table[numbers]"),
    (head, lambda: (normal(64, 8), normal(500, 8), torch.arange(64)), LIBRARY, "linear_cross_entropy(hidden, weight"),
    (
        mixture_made_elsewhere,
        lambda: (mixed_normals(), normal(260, 24)),
        NAMED,
        "Mixture(mixed.mixture_distribution, mixed.component_distribution).log_prob(x)",
    ),
    (
        mixture_made_by_a_method,
        lambda: (Density(mixed_normals()), normal(260, 24)),
        NAMED,
        "Mixture(mixed.mixture_distribution, mixed.component_distribution).log_prob(x)",
    ),
    (
        head_of_a_layer,
        lambda: (nn.Linear(8, 500).double(), normal(64, 8), torch.arange(64)),
        LIBRARY,
        "linear_cross_entropy(hidden, layer.weight, targets, linear_bias=layer.bias, options",
    ),
    (
        next_positions,
        lambda: (nn.Linear(8, 500, bias=False).double(), normal(4, 17, 8), torch.arange(68).view(4, 17)),
        LIBRARY,
        "linear_cross_entropy(hidden[:, :-1].flatten(0, -2), layer.weight, targets[:, 1:].reshape(-1), ignore_index=0",
    ),
    (
        classes_second,
        lambda: (
            nn.Linear(8, 500).double(),
            normal(4, 16, 8),
            torch.arange(64).view(4, 16),
            nn.CrossEntropyLoss(ignore_index=3),
        ),
        LIBRARY,
        "layer.weight, targets.flatten(), linear_bias=layer.bias, ignore_index=criterion.ignore_index",
    ),
    (
        smoothed,
        lambda: (
            nn.Linear(8, 500).double(),
            normal(64, 8),
            torch.arange(64),
            nn.CrossEntropyLoss(label_smoothing=0.1),
        ),
        LOOP,
        "part_of(hidden, targets, layer, criterion)",
    ),
    (
        printed,
        lambda: (normal(20, 33, 24), normal(18, 33, 24)),
        NAMED,
        "print(f'{effops.broadcast_dot(loc, x.unsqueeze(1)).mean():.3f}', flush=True)",
    ),
    (
        stored,
        lambda: (normal(20, 33, 24), normal(18, 33, 24), []),
        NAMED,
        "losses.append(effops.broadcast_dot(loc, x.unsqueeze(1)).mean())",
    ),
    (
        differentiated,
        lambda: (normal(20, 33, 24), normal(18, 33, 24)),
        NAMED,
        "effops.broadcast_dot(loc, x.unsqueeze(1)).mean().backward()",
    ),
    (read_as_a_number, lambda: (normal(160, 3),), LOOP, ".item()"),
    (printed_of_pairs, lambda: (normal(160, 3),), LOOP, "print(torch."),
    (leaky, lambda: (normal(64, 24), normal(60, 24), normal(24)), LOOP, "checkpoint(part_of, part, "),
    (triplets, lambda: (normal(40, 40), 0.5), LOOP, "part_1 / part_2"),
    (pairs_of_one, lambda: (normal(160, 3),), LOOP, "points_part"),
    (templates, lambda: (normal(6000, grad=False), normal(9)), LOOP, ""),
    (in_chunks, lambda: (normal(512, 4), normal(512, 4)), LOOP, "loss = checkpoint(part_of, "),
]


HEADS = head, head_of_a_layer, next_positions, classes_second


@pytest.mark.usefixtures("one_thread")  # blocks of several threads are most of a tensor of these sizes
@pytest.mark.parametrize(
    ("program", "arguments", "how", "code"),
    [
        pytest.param(*case, id=case[0].__name__, marks=() if number % 4 == 0 else pytest.mark.slow)
        for number, case in enumerate(CASES)
    ],
)
def test_fix(program, arguments, how, code, monkeypatch):
    if program in HEADS and not hasattr(functional, "linear_cross_entropy"):
        pytest.skip("before torch 2.13 there is no linear_cross_entropy")
    if how == LOOP:  # where the function cannot be put into tiles
        monkeypatch.setattr(proposals, "in_tiles", lambda found: None)
    torch.manual_seed(0)
    given = arguments()
    proposed = fixes(program, *given)
    assert proposed
    found, fix = proposed[0]
    assert fix is not None
    assert fix.how == how, fix.code
    assert code in fix.code
    assert 2 * fix.after_bytes <= found.now_bytes
    known = {**dict(zip(inspect.signature(program).parameters, given)), "part": normal(8, 4), "loss": normal()}
    known |= {"mixed": given[0].mixed} if isinstance(given[0], Density) else {}
    known |= {"found": normal(5992), "windows": normal(5992, 9, grad=False)}
    mended, original = (
        outcome(run, {name: known[name] for name in fix.names}) for run in (fix.function(), fix.original())
    )
    assert mended.keys() == original.keys()
    for name, value in original.items():
        torch.testing.assert_close(mended[name], value, rtol=1e-6, atol=1e-9, msg=f"{name}: {fix.code}")


def test_statements_without_tensors_are_not_run_at_full_size():
    """The whole program was run for real, at its own sizes, where one statement did all of it."""
    runs = []

    def program():
        def whole():
            x = torch.randn(2000, 64)
            runs.append(type(x))
            return (x[:, None] * x).sum(-1).amax()

        return whole()

    def outer():
        return program()

    assert fixes(outer)
    assert {one for one in runs if one is torch.Tensor} == set()


def outcome(function, arguments):
    """The result of a function, and its gradients by the names of the arguments."""
    copies = {name: one.clone() if isinstance(one, torch.Tensor) else one for name, one in arguments.items()}
    result = function(**copies)
    if isinstance(result, float):
        return {"result": torch.tensor(result)}
    weights = torch.linspace(1, 2, result.numel(), dtype=result.dtype).view(result.shape)
    wanted = {name: one for name, one in arguments.items() if getattr(one, "requires_grad", False)}
    gradients = torch.autograd.grad(result, list(wanted.values()), weights, allow_unused=True)
    return {"result": result, **dict(zip(wanted, gradients))}


class Edges(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other, self.score = (torch.nn.Linear(size, to).double() for size, to in ((8, 8), (8, 8), (8, 1)))

    def forward(self, h):
        edges = torch.sigmoid(self.one(h)[:, None] + self.other(h))
        return self.score(edges).squeeze(-1)


def test_parameters_alone_need_gradients(monkeypatch):
    monkeypatch.setattr(proposals, "in_tiles", lambda found: None)
    """The loop was not checkpointed: it kept as much as before."""
    edges = Edges()
    _, fix = fixes(edges.forward, normal(64, 8, grad=False))[0]
    assert "checkpoint(part_of, part, " in fix.code


def test_lines_that_a_fix_replaces_are_those_of_the_statements_that_change():
    """All lines up to the reducing one were named, with those that stay."""

    def loss(points, others):
        products = points[:, None] * others
        similarity = products.sum(-1)
        shifted = similarity - 1
        return torch.logsumexp(shifted, -1)

    first = inspect.getsourcelines(loss)[1] + 1
    _, fix = fixes(loss, normal(64, 24), normal(60, 24))[0]
    assert fix.lines == (first, first + 1)


LINES = {
    "def squares(x, y): return DISTANCES": "def squares(x, y):\n    return ",
    "squares = lambda x, y: DISTANCES  # of pairs": "squares = lambda x, y: ",
    "squares = (\n    lambda x, y:\n    DISTANCES\n)": "",
    "def squares(x, y):\n    n = len(x); d = DISTANCES; return d[:n]": "n = len(x)\nd = ",
    "def squares(x, y):\n    if x is y: d = x\n    else: d = DISTANCES  # of pairs\n    return d": "else:\n    d = ",
    "def squares(x, y):\n    for k in {0: 1}: d = DISTANCES; d = -d\n    return d": "for k in {0: 1}:\n    d = ",
    "def squares(x, y):\n    if n := len(x): d = DISTANCES\n    return d + n": "if n := len(x):\n    d = ",
    "def squares(x, y):\n    try: d = DISTANCES\n    finally: x = 0\n    return d": "try:\n    d = ",
    "def squares(x, y):\n    z = x[:, None] - y; k = 2\n    return (z ** 2).sum(-1) * k": "k = 2\nreturn ",
}
NOT_IN_PLACE = (
    "def squares(x,\n            y): return DISTANCES",
    "squares = [\n    lambda x, y: torch.sigmoid(x[:, None] * y + x[:, None]).sum(-1).mean()][0]",
)


@pytest.mark.parametrize("source", LINES)
def test_what_stands_beside_a_statement_on_its_line_stays(source, tmp_path):
    """The code took the place of the line, and the head of the function that stood there was lost."""
    file = tmp_path / "squares.py"
    file.write_text("import torch\n" + source.replace("DISTANCES", "((x[:, None] - y) ** 2).sum(-1)") + "\n")
    module = runpy.run_path(str(file))
    arguments = normal(64, 24, grad=False), normal(60, 24, grad=False)
    _, fix = fixes(module["squares"], *arguments)[0]
    assert fix.code.startswith(LINES[source])
    rows = file.read_text().splitlines()
    first, last = fix.lines[0], fix.lines[-1]
    depth = len(rows[first - 1]) - len(rows[first - 1].lstrip())
    rows[first - 1 : last] = textwrap.indent(fix.code, " " * depth).splitlines()
    mended: dict[str, Any] = {}
    exec("\n".join(rows), mended)
    assert torch.allclose(mended["squares"](*arguments), module["squares"](*arguments), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("source", NOT_IN_PLACE)
def test_code_that_cannot_stand_in_place_of_lines(source, tmp_path):
    """It was put into the middle of an expression."""
    file = tmp_path / "squares.py"
    file.write_text("import torch\n" + source.replace("DISTANCES", "((x[:, None] - y) ** 2).sum(-1)") + "\n")
    squares = runpy.run_path(str(file))["squares"]
    _, fix = fixes(squares, normal(64, 24, grad=False), normal(60, 24, grad=False))[0]
    assert fix.lines == ()
    ast.parse(f"def whole():\n{textwrap.indent(fix.code, '    ')}")


def test_equal_code_of_two_files(tmp_path):
    """On Python 3.10 the function of the second file was taken to stand on the lines of that of the first."""
    lines = []
    for name, source in (("first.py", next(iter(LINES))), ("second.py", NOT_IN_PLACE[0])):
        file = tmp_path / name
        file.write_text("import torch\n" + source.replace("DISTANCES", "((x[:, None] - y) ** 2).sum(-1)") + "\n")
        squares = runpy.run_path(str(file))["squares"]
        _, fix = fixes(squares, normal(64, 24, grad=False), normal(60, 24, grad=False))[0]
        lines.append(fix.lines)
    assert lines == [(2,), ()]


def precision_and_recall(points, others, tau):
    distances = torch.cdist(points, others, compute_mode="donot_use_mm_for_euclid_dist")
    return (distances.amin(2) < tau).double().mean(1), (distances.amin(1) < tau).double().mean(1)


def overlaps(boxes, others):
    corner = torch.maximum(boxes[:, None, :2], others[None, :, :2])
    sides = (torch.minimum(boxes[:, None, 2:], others[None, :, 2:]) - corner).clamp(min=0)
    found = sides.prod(-1) > 0.5
    return found.any(1).double().mean(), found.any(0).double().mean()


@pytest.mark.parametrize("tau", [1e-3, 0.5, 1.5, 100.0])
def test_thresholds_that_no_number_of_a_trial_crosses(tau):
    """All of a trial's numbers were on one side, so that a sum or a maximum of means was taken for the mean."""
    points, others = torch.randn(2, 96, 3, dtype=torch.float64), torch.randn(2, 100, 3, dtype=torch.float64)
    boxes = torch.rand(90, 4, dtype=torch.float64) + torch.tensor([0, 0, 1, 1])
    for program, arguments in (
        (precision_and_recall, {"points": points, "others": others, "tau": tau}),
        (overlaps, {"boxes": boxes, "others": boxes.flip(0) + 0.1}),
    ):
        proposed = [fix for _, fix in fixes(program, *arguments.values()) if fix is not None]
        for fix in proposed:
            known = {**arguments, "tau": 0.4, "distances": torch.cdist(points, others)}
            given = [known[name] for name in fix.names]
            torch.testing.assert_close(fix.function()(*given), fix.original()(*given), msg=fix.code)


def test_distances_to_itself_are_not_negative():
    """By rounding they were, and the root of one with an epsilon is NaN."""

    def distances(points, eps):
        return (((points[:, None] - points[None]) ** 2).sum(-1) + eps).sqrt()

    _, fix = fixes(distances, normal(96, 64, grad=False), 1e-12)[0]
    points = torch.randn(96, 64)
    assert fix.how == "contraction"
    given = {"points": points, "eps": 1e-12}
    assert fix.function()(*(given[name] for name in fix.names)).isfinite().all()


def test_the_lines_of_what_prints(tmp_path):
    """They were those of the first line of the file, which was cut at the columns of the statement."""
    file = tmp_path / "printed.py"
    file.write_text(
        f"# {'é' * 150}\nimport torch\ndef squares(x, y):\n    print(((x[:, None] - y) ** 2).sum(-1).mean())\n"
    )
    squares = runpy.run_path(str(file))["squares"]
    _, fix = fixes(squares, normal(64, 24, grad=False), normal(60, 24, grad=False))[0]
    assert fix.lines == (4,)
    assert "é" not in fix.code


def test_turns_that_each_keep_what_a_fix_makes():
    """The largest tensor of one turn was compared with those of all turns: another product of as much was proposed."""

    def layers(x, mask):
        for _ in range(6):
            scores = (x @ x.transpose(-2, -1)) / 3.0
            scores = scores.masked_fill(~mask, -math.inf)
            scores = scores.softmax(-1)
            x = x + scores @ x
        return x

    found, fix = fixes(layers, normal(8, 64, 8), torch.ones(64, 64, dtype=torch.bool).tril())[0]
    assert found.is_loop
    assert fix is None or "checkpoint" in fix.code or "effops" in fix.code


NEEDS_IMPORTS = {
    "import effops": "return (x[:, None] * y).sum(-1)",
    "from torch.utils.checkpoint import checkpoint": "return (x[:, None] * y).sin().amax(-1).amax(1)",
}


@pytest.mark.parametrize("imports", NEEDS_IMPORTS)
def test_imports_stand_apart(imports, tmp_path, monkeypatch):
    """They stood inside of the function, at the indentation of the code."""
    monkeypatch.setattr(proposals, "in_tiles", lambda found: None)
    file = tmp_path / "pairs.py"
    file.write_text(f"import torch\n\ndef pairs(x, y):\n    {NEEDS_IMPORTS[imports]}\n")
    pairs = runpy.run_path(str(file))["pairs"]
    given = normal(64, 24), normal(60, 24)
    finding = effops.lint(pairs, *given, least=0, times=2).findings[0]
    assert finding.fix is not None
    assert finding.fix.imports == (imports,)
    assert "import" not in finding.fix.code
    assert f"\n  at the top of the file: {'; '.join(finding.fix.imports)}\n    " in str(finding)
    assert finding.to_json()["fix"]["imports"] == finding.fix.imports
    rows = file.read_text().splitlines()
    rows[3:4] = textwrap.indent(finding.fix.code, "    ").splitlines()
    mended: dict[str, Any] = {}
    exec("\n".join([*finding.fix.imports, *rows]), mended)
    torch.testing.assert_close(mended["pairs"](*given), pairs(*given))


def test_files_are_not_written_by_trials(tmp_path):
    """A helper that appends to a file ran once for each trial of a fix, in throw-away folders too."""
    file = tmp_path / "notes"

    def note(x):
        with file.open("a") as opened:
            opened.write("ran\n")
        return x

    def distances(x, y):
        d = note((x[:, None] - y).square().sum(-1))
        return torch.exp(-d).sum(1)

    (finding,) = effops.lint(distances, torch.empty(4096, 32), torch.empty(2048, 32)).findings
    assert file.read_text() == "ran\n"
    assert finding.fix is None


def test_what_ran_once_has_no_turns():
    def nearest(e, i, j):
        d = (e[i][:, None] - e[j]).abs()
        return d.sum(-1).amin(1)

    i, j = torch.zeros(2000, dtype=torch.int64), torch.zeros(3000, dtype=torch.int64)
    (finding,) = effops.lint(nearest, torch.empty(5000, 64), i, j).findings
    assert finding.fix is not None
    assert "turns" not in finding.fix.why
