"""effops.text: names that were mistyped."""

import pytest

from effops.dispatch.op import ops
from effops.text import did_you_mean

SIZES = ["d_model", "layers", "heads", "seq_len"]


@pytest.mark.parametrize(
    ("given", "known", "near"),
    [
        ("attn", ops(), "attention"),
        ("normal", ops(), "normal_log_prob"),
        ("dot", ops(), "broadcast_dot"),
        ("GPU", ["cpu", "cuda"], "cuda"),
        ("width", SIZES, "d_model"),
        ("widht", SIZES, "d_model"),
        ("lenght", SIZES, "seq_len"),
        ("layer", SIZES, "layers"),
    ],
)
def test_the_name_that_is_meant(given, known, near):
    assert did_you_mean(given, known) == f'; did you mean "{near}"?'


@pytest.mark.parametrize(
    ("given", "known"),
    [
        ("gitlab", ["text", "github"]),
        ("tpu", ["cpu", "cuda"]),
        ("width", ["batch", "seed"]),
        ("", ops()),
        (None, ops()),
    ],
)
def test_no_name_is_meant(given, known):
    """Another thing that exists is no typing error: "gitlab" was answered by "github"."""
    assert did_you_mean(given, known) == ""
