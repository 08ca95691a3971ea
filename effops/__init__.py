"""Memory-efficient operations for PyTorch."""

from effops.op import Explanation, VariantReport, explain, use_variant, variants
from effops.ops.power_spherical import power_spherical_log_prob

__version__ = "0.1.0"

__all__ = [
    "Explanation",
    "VariantReport",
    "__version__",
    "explain",
    "power_spherical_log_prob",
    "use_variant",
    "variants",
]
