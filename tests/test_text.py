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
        ("vmf_log_prob", ops(), "von_mises_fisher_log_prob"),
        ("vmf_mixture_log_prob", ops(), "von_mises_fisher_mixture_log_prob"),
        ("VMF", ["PowerSpherical", "VonMisesFisher"], "VonMisesFisher"),
        ("norml_log_prob", ops(), "normal_log_prob"),
        ("power_sphere_log_prob", ops(), "power_spherical_log_prob"),
        ("scale", ["concentration", "validate_args"], "concentration"),
        ("kappa", ["scale", "validate_args"], "scale"),
    ],
)
def test_the_name_that_is_meant(given, known, near):
    assert did_you_mean(given, known) == f'; did you mean "{near}"?'


@pytest.mark.parametrize(
    ("given", "known"),
    [
        ("gitlab", ["text", "github"]),
        ("cauchy_log_prob", ops()),
        ("tpu", ["cpu", "cuda"]),
        ("width", ["batch", "seed"]),
        ("", ops()),
        (None, ops()),
    ],
)
def test_no_name_is_meant(given, known):
    """Another thing that exists is no typing error: "gitlab" was answered by "github"."""
    assert did_you_mean(given, known) == ""
