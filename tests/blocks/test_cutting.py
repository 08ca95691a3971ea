"""How calls are cut into blocks: as few as memory allows, each computed as seldom as can be."""

import math

import pytest
import torch

import effops
from effops.blocks.cutting import sizes
from effops.blocks.dots import DotScores, Products


@pytest.fixture
def evaluated(monkeypatch):
    """The number of pairs of each block of products that is computed."""
    pairs = []
    evaluate = Products.evaluate

    def counted(self, block, out):
        pairs.append(math.prod(sizes(block.pairs)))
        return evaluate(self, block, out)

    monkeypatch.setattr(Products, "evaluate", counted)
    return pairs


@pytest.mark.parametrize(("keys", "times"), [(1024, 1), (3000, 1), (4096, 1), (5000, 2)])
def test_backward_of_attention_computes_pairs_once_where_a_block_has_whole_rows(keys, times, evaluated, generator):
    """Once the scores and once the gradients of the weights; twice each where a row has several blocks."""
    query, key, value = (
        torch.randn(1, 1, length, 4, generator=generator, requires_grad=True) for length in (256, keys, keys)
    )
    out = effops.attention(query, key, value, variant="chunked")
    evaluated.clear()
    torch.autograd.grad(out.sum(), (query, key, value))
    assert sum(evaluated) == 2 * times * 256 * keys


@pytest.mark.parametrize(
    ("loc", "x"), [((1, 512), (128, 1, 512)), ((1,), (16384,))], ids=["a batch", "rows of one matrix"]
)
def test_copies_for_products_do_not_cut_blocks_of_few_columns(loc, x, generator, monkeypatch):
    """One component's scores of points in bfloat16, of which the product copies 1,024 at a time, are one block."""
    blocks = []
    evaluate = DotScores.evaluate
    monkeypatch.setattr(
        DotScores, "evaluate", lambda self, block, out: blocks.append(block) or evaluate(self, block, out)
    )
    loc, x = (
        torch.nn.functional.normalize(torch.randn(*shape, 128, generator=generator), dim=-1).bfloat16()
        for shape in (loc, x)
    )
    scale = torch.full(loc.shape[:-1], 10.0)
    out = effops.von_mises_fisher_log_prob(loc, scale, x, variant="chunked")
    assert len(blocks) == 1
    torch.testing.assert_close(out, effops.von_mises_fisher_log_prob(loc, scale, x, variant="einsum"))
