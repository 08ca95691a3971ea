"""Named ops are proposed for attention, additive scores and contractions as people write them, and for nothing else."""

import ast
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import effops
from effops.programs.large import proposals
from effops.programs.large.source.definitions import Definitions
from effops.programs.large.source.trials import with_products

from .test_fixes import fixes, normal, outcome

BATCH, HEADS, LENGTH, WIDTH = 4, 3, 176, 12
pytestmark = pytest.mark.usefixtures("one_thread")  # blocks of several threads are most of a tensor of these sizes


class SelfAttention(nn.Module):
    """Attention as nanoGPT writes it: one name for all steps, and a buffer of ones and zeros as the mask."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.heads, self.dropout = HEADS, dropout
        self.attention = nn.Linear(WIDTH, 3 * WIDTH).double()
        self.attn_dropout, self.softmax = nn.Dropout(dropout), nn.Softmax(dim=3)
        self.register_buffer("bias", torch.tril(torch.ones(200, 200)).view(1, 1, 200, 200))

    def projected(self, x):
        B, T, C = x.size()
        return (one.view(B, T, self.heads, C // self.heads).transpose(1, 2) for one in self.attention(x).split(C, 2))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.projected(x)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        att = self.attn_dropout(att)
        y = att @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return y


class Dropped(SelfAttention):
    def forward(self, x):
        q, k, v = self.projected(x)
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        probs = self.softmax(scores)
        probs = F.dropout(probs, p=self.dropout, training=self.training)
        return torch.matmul(probs, v)


class Built(SelfAttention):
    """The mask is built among the steps."""

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.projected(x)
        att = (q @ k.transpose(-2, -1)) / (d // self.heads) ** 0.5
        mask = torch.tril(torch.ones(n, n, device=x.device)).bool()
        att = att.masked_fill(~mask, float("-inf"))
        att = att.softmax(-1)
        return (att @ v).transpose(1, 2).reshape(b, n, d)


class BuiltAbove(SelfAttention):
    """The mask is built once, above a loop."""

    def forward(self, x):
        T = x.size(1)
        later = torch.triu(torch.ones(T, T, dtype=torch.bool, device=x.device), diagonal=1)
        for _ in range(3):
            q, k, v = self.projected(x)
            att = torch.einsum("b h i d, b h j d -> b h i j", q, k) * q.shape[-1] ** -0.5
            att = torch.where(later[None, None], -math.inf, att)
            att = F.softmax(att, dim=-1)
            x = x + torch.einsum("bhij,bhjd->bhid", att, v).transpose(1, 2).flatten(2)
        return x


class Banded(SelfAttention):
    """The band of the mask is wider than a trial on small tensors: there it looks causal."""

    def forward(self, x):
        T = x.size(1)
        band = torch.tril(torch.ones(T, T)).bool() & ~torch.tril(torch.ones(T, T), diagonal=-64).bool()
        q, k, v = self.projected(x)
        att = (q @ k.transpose(-2, -1)) * 0.5
        att = att.masked_fill(~band, float("-inf"))
        return att.softmax(-1) @ v


class OneMore(SelfAttention):
    """A key later than the query takes part."""

    def forward(self, x):
        T = x.size(1)
        mask = torch.tril(torch.ones(T, T), diagonal=1)
        q, k, v = self.projected(x)
        att = (q @ k.transpose(-2, -1)) * 0.5
        att = att.masked_fill(mask == 0, float("-inf"))
        return att.softmax(-1) @ v


class Changed(SelfAttention):
    """The mask is changed after it was built."""

    def forward(self, x):
        T = x.size(1)
        mask = torch.tril(torch.ones(T, T))
        mask[:, 0] = 0
        mask[0, 0] = 1
        mask[1, 0] = 1
        q, k, v = self.projected(x)
        att = (q @ k.transpose(-2, -1)) * 0.5
        att = att.masked_fill(mask == 0, float("-inf"))
        return att.softmax(-1) @ v


def masked_twice(q, k, v, padding, later):
    scores = q @ k.mT
    scores /= 2.0
    scores = scores.masked_fill(padding[:, None, None] == 0, -1e9)
    scores = scores.masked_fill(later, -1e9)
    weights = torch.softmax(scores, -1)
    return weights @ v


def biased(q, k, v, bias, later):
    q = q * 0.5
    scores = q @ k.mT
    scores += bias
    scores = scores.masked_fill(later, -math.inf)
    scores = nn.Softmax(dim=-1)(scores)
    return scores @ v


def added(q, k, v):
    T = q.shape[-2]
    mask = torch.full((T, T), float("-inf")).triu(1)
    scores = q @ k.mT
    scores = scores + mask
    scores = scores.softmax(-1)
    return scores @ v


def learned_scale(q, k, v, temperature):
    scores = q @ k.mT
    scores = scores * temperature
    scores = scores.softmax(-1)
    return scores @ v


def heads(grad=True):
    return [normal(BATCH, HEADS, LENGTH, 4, grad=grad) for _ in range(3)]


def later():
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)


def hidden():
    return normal(BATCH, LENGTH, WIDTH, grad=False)


def padding():
    return (torch.arange(LENGTH) < torch.tensor([[LENGTH], [100], [80], [60]])).long()


# The code, and values of the names that it reads, beside those of `known`.
ATTENTION = [
    (SelfAttention, "q, k, v, attn_mask=self.bias[:, :, :T, :T] != 0, scale=1.0 / math.sqrt(k.size(-1)))", {}),
    (Dropped, "q, k, v, scale=1 / math.sqrt(k.size(-1)))", {}),
    (Built, "q, k, v, is_causal=True, scale=1 / (d // self.heads) ** 0.5)", {}),
    (BuiltAbove, "q, k, v, is_causal=True, scale=q.shape[-1] ** (-0.5))", {}),
    (Banded, "q, k, v, attn_mask=band, scale=0.5)", {}),
    (OneMore, "q, k, v, attn_mask=mask != 0, scale=0.5)", {}),
    (Changed, "q, k, v, attn_mask=mask != 0, scale=0.5)", {"mask": torch.ones(LENGTH, LENGTH).tril()}),
    (
        masked_twice,
        "q, k, v, attn_mask=(padding[:, None, None] != 0) & ~later, scale=1 / 2.0)",
        {"padding": padding(), "later": later()},
    ),
    (
        biased,
        "q, k, v, attn_mask=torch.where(~later, bias, float('-inf')), scale=1.0)",
        {"bias": normal(HEADS, 1, LENGTH, grad=False), "later": later()},
    ),
    (added, "q, k, v, is_causal=True, scale=1.0)", {}),
    (learned_scale, "q * temperature, k, v, scale=1.0)", {"temperature": normal(HEADS, 1, 1)}),
]


def names_of(made, more):
    q, k, v = heads()
    self = made if isinstance(made, nn.Module) else None
    sizes = {"b": BATCH, "n": LENGTH, "d": WIDTH, "B": BATCH, "T": LENGTH, "C": WIDTH}
    return {"q": q, "k": k, "v": v, "x": hidden(), "self": self, **sizes, **more}


def found_in(program, *arguments):
    """The largest finding, and its fix."""
    found = fixes(program, *arguments)
    assert found
    return found[0]


def named(fix):
    return fix is not None and fix.how == "named op"


@pytest.mark.parametrize(("program", "code", "more"), ATTENTION, ids=[one[0].__name__ for one in ATTENTION])
def test_attention(program, code, more):
    torch.manual_seed(0)
    is_layer = isinstance(program, type)
    made = program() if is_layer else program
    found, fix = found_in(made, *([hidden()] if is_layer else [*heads(), *more.values()]))
    assert fix is not None
    assert f"effops.attention({code}" in fix.code
    assert fix.how == "named op"
    assert 2 * fix.after_bytes <= found.now_bytes
    known = names_of(made, more)
    given = {name: known[name] for name in fix.names}
    mended, original = outcome(fix.function(), given), outcome(fix.original(), given)
    assert mended.keys() == original.keys()
    for name, value in original.items():
        torch.testing.assert_close(mended[name], value, rtol=1e-6, atol=1e-9, msg=f"{name}: {fix.code}")


def test_lines_of_a_mask_go_too():
    """The mask is built five lines above the attention, before a loop."""
    _, fix = found_in(BuiltAbove(), hidden())
    first = BuiltAbove.forward.__code__.co_firstlineno
    assert fix.lines == (first + 2, *range(first + 5, first + 9))


def test_layers_that_each_keep_their_weights():
    layers = nn.Sequential(*(SelfAttention() for _ in range(5)))
    found, fix = found_in(layers, hidden())
    assert len(found.turns) == 5
    assert fix.code.splitlines()[-1].startswith("y = effops.attention(q, k, v, attn_mask=self.bias")
    assert "attention_weights" not in fix.code


@pytest.mark.parametrize(
    ("layer", "chance"),
    [
        (SelfAttention, "self.attn_dropout.p if self.attn_dropout.training else 0.0"),
        (Dropped, "self.dropout if self.training else 0.0"),
    ],
)
@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
def test_dropout_of_weights(layer, chance, mode):
    """Other weights are dropped, so that single results differ: their means are those without dropout."""
    made = layer(dropout=0.25).train(mode)
    _, fix = found_in(made, normal(32, LENGTH, WIDTH, grad=False))  # blocks take 4 MiB at most
    assert "effops.attention(q, k, v, " in fix.code
    assert f"dropout_p={chance})" in fix.code
    known = names_of(made, {name: normal(1, 1, 6, 4, grad=False).expand(20_000, 1, 6, 4) for name in "qkv"})
    known |= {"T": 6}
    dropped = fix.function()(*(known[name] for name in fix.names))
    whole = fix.original()(*({**known, "self": made.eval()}[name] for name in fix.names))
    torch.testing.assert_close(dropped.mean(0), whole.mean(0), rtol=0.03, atol=0.03)
    assert bool((dropped.std(0) > 1e-6).all()) is mode


class FilledWithZero(SelfAttention):
    """Zero is a score like others."""

    def forward(self, x):
        T = x.size(1)
        q, k, v = self.projected(x)
        att = q @ k.transpose(-2, -1)
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, 0.0)
        att = F.softmax(att, dim=-1)
        return att @ v


class OtherAxis(SelfAttention):
    """The softmax runs over queries."""

    def forward(self, x):
        q, k, v = self.projected(x)
        att = q @ k.transpose(-2, -1)
        att = F.softmax(att, dim=-2)
        return att @ v


class DroppedScores(SelfAttention):
    """Scores are dropped, and no weights."""

    def forward(self, x):
        q, k, v = self.projected(x)
        att = q @ k.transpose(-2, -1)
        att = F.dropout(att, 0.25)
        att = F.softmax(att, dim=-1)
        return att @ v


class ScaledMask(SelfAttention):
    """What is added is scaled too, and by a number that is not 1."""

    def forward(self, x):
        T = x.size(1)
        q, k, v = self.projected(x)
        att = q @ k.transpose(-2, -1)
        att = att + self.bias[:, :, :T, :T]
        att = att * 0.5
        att = F.softmax(att, dim=-1)
        return att @ v


@pytest.fixture
def no_tiles(monkeypatch):
    """Tiles are what is proposed last, and take seconds to try."""
    monkeypatch.setattr(proposals, "in_tiles", lambda found: None)


@pytest.mark.slow
@pytest.mark.usefixtures("no_tiles")
@pytest.mark.parametrize("layer", [FilledWithZero, OtherAxis, DroppedScores, ScaledMask])
def test_what_is_almost_attention(layer):
    _, fix = found_in(layer(), hidden())
    assert not named(fix)


class Additive(nn.Module):
    def __init__(self, size=24, scores=1, bias=True):
        super().__init__()
        self.wq, self.wk = nn.Linear(size, size).double(), nn.Linear(size, size, bias=False).double()
        self.v = nn.Linear(size, scores, bias=bias).double()
        self.b, self.tanh = nn.Parameter(torch.ones(size, dtype=torch.float64)), nn.Tanh()

    def forward(self, q, k):
        return self.v(torch.tanh(self.wq(q).unsqueeze(2) + self.wk(k).unsqueeze(1))).squeeze(-1)


class InSteps(Additive):
    def forward(self, q, k):
        q, k = self.wq(q), self.wk(k)
        features = q.unsqueeze(2) + k.unsqueeze(1)
        features = self.tanh(features)
        scores = self.v(features)
        scores = scores.squeeze(-1)
        return scores


class WithBiasInside(Additive):
    def forward(self, q, k):
        features = torch.tanh(self.wk(k)[:, None] + self.wq(q)[:, :, None, :] + self.b)
        return F.linear(features, self.v.weight, self.v.bias)[..., 0]


class AxisKept(Additive):
    def forward(self, q, k):
        e = torch.tanh(self.wq(q).unsqueeze(-2) + self.wk(k).unsqueeze(-3))
        return torch.softmax(e @ self.v.weight.mT, dim=2)


class Rectified(Additive):
    def forward(self, q, k):
        return self.v(torch.relu(self.wq(q).unsqueeze(2) + self.wk(k).unsqueeze(1))).squeeze(-1)


class Multiplied(Additive):
    def forward(self, q, k):
        return self.v(torch.tanh(self.wq(q).unsqueeze(2) * self.wk(k).unsqueeze(1))).squeeze(-1)


class TwoScores(Additive):
    def forward(self, q, k):
        return self.v(torch.tanh(self.wq(q).unsqueeze(2) + self.wk(k).unsqueeze(1))).amax(-1)


def of_pairs():
    return normal(2, 133, 24, grad=False), normal(2, 131, 24, grad=False)


ADDITIVE = [
    (Additive(), "effops.additive_attention_scores(self.wq(q), self.wk(k), self.v.weight.squeeze(0)) + self.v.bias"),
    (Additive(bias=False), "effops.additive_attention_scores(self.wq(q), self.wk(k), self.v.weight.squeeze(0))"),
    (InSteps(), "effops.additive_attention_scores(q, k, self.v.weight.squeeze(0)) + self.v.bias"),
    (
        WithBiasInside(),
        "effops.additive_attention_scores(self.wq(q) + self.b, self.wk(k), self.v.weight.squeeze(0)) + self.v.bias",
    ),
    (
        AxisKept(),
        "effops.additive_attention_scores(self.wq(q), self.wk(k), self.v.weight.mT.squeeze(-1)).unsqueeze(-1)",
    ),
]


@pytest.mark.parametrize(("layer", "code"), ADDITIVE, ids=[type(one[0]).__name__ for one in ADDITIVE])
def test_additive_scores_by_layers(layer, code):
    q, k = of_pairs()
    found, fix = found_in(layer, q, k)
    assert fix is not None
    assert code in fix.code
    assert 2 * fix.after_bytes <= found.now_bytes
    if isinstance(layer, InSteps):
        q, k = layer.wq(q).detach(), layer.wk(k).detach()
    known = {"q": q, "k": k, "self": layer}
    given = [known[name] for name in fix.names]
    torch.testing.assert_close(fix.function()(*given), fix.original()(*given))


@pytest.mark.slow
@pytest.mark.usefixtures("no_tiles")
@pytest.mark.parametrize("layer", [Rectified(), Multiplied(), TwoScores(scores=2)])
def test_what_is_almost_additive(layer):
    _, fix = found_in(layer, *of_pairs())
    assert not named(fix)


def bilinear(a, b, weights):
    return torch.einsum("bi,bj,ijk->bk", a, b, weights)


def broadcast(a, b, weights):
    products = a[:, :, None, None] * b[:, None, :, None]
    products = products * weights
    return products.sum((1, 2))


def largest_product(a, b, weights):
    products = a[:, :, None, None] * b[:, None, :, None] * weights
    return products.amax((1, 2))


def products_and_sum(a, b, weights):
    products = a[:, :, None, None] * b[:, None, :, None] + weights
    return products.square().sum((1, 2))


def two_operands(a, b, weights):
    return torch.einsum("bi,bj->bij", a, b).amax((1, 2))


def lint_of_contraction(program, columns):
    """Lint at a size where no path keeps the budget: 150,000 rows."""

    def run():
        return program(torch.randn(150_000, 64), torch.randn(150_000, 64), torch.randn(64, 64, columns))

    return effops.lint(run).findings


@pytest.mark.parametrize(
    ("program", "columns", "code"),
    [
        (bilinear, 16, "return effops.einsum('bi,bj,ijk->bk', a, b, weights)"),
        (broadcast, 4, "return effops.einsum('abcd,abcd,bcd->ad', a[:, :, None, None], b[:, None, :, None], weights)"),
    ],
)
def test_contractions_of_three_operands(program, columns, code):
    finding = lint_of_contraction(program, columns)[0]
    assert finding.fix is not None
    assert finding.fix.code.splitlines()[-1] == code
    assert finding.after_bytes <= 64 * 2**20 < finding.now_bytes / 2
    a, b, weights = torch.randn(50, 6), torch.randn(50, 7), torch.randn(6, 7, 3)
    torch.testing.assert_close(finding.fix.function()(a, b, weights), program(a, b, weights))


@pytest.mark.slow
@pytest.mark.usefixtures("no_tiles")
@pytest.mark.parametrize("program", [largest_product, products_and_sum, two_operands])
def test_what_is_almost_a_contraction(program):
    for finding in lint_of_contraction(program, 4):
        assert not named(finding.fix)


def test_numbers_that_are_products_of_sizes():
    """`reshape(B, T, C)` failed in every trial, where C is the width of all heads together."""
    found = with_products({176: 5, 16: 6}, {3, 4, 16, 176})
    assert (found[176], found[16], found[3 * 16], found[4 * 16], found[16 * 176]) == (5, 6, 18, 24, 30)
    assert 3 * 64 not in found


def test_a_name_stands_for_what_was_assigned_last():
    source = "a = x\na = -a\nfor i in b:\n    c = a\n    a = i\nd = a\na += d"
    statements = ast.parse(source).body
    definitions = Definitions(statements)
    first, second, loop, after, _ = statements
    assert definitions.of(second.value.operand).value is first.value
    assert definitions.of(loop.body[0].value).value is None
    assert definitions.of(after.value).value is None
    assert not definitions.are_same(second.value, after.value)
    assert definitions.are_same(first.value, after.value)
