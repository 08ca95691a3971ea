"""Memory-efficient operations for PyTorch: what large broadcasts compute, without their memory.

Operations are functions such as `effops.attention` and `effops.power_spherical_log_prob`, layers in `effops.nn`, and
distributions in `effops.distributions`. `effops.explain` tells which variant a call takes. For any other program there
are `effops.lint`, which names lines that take much, `effops.tiled`, which runs a function in bounded memory, and
`effops.budget`, which holds it to a limit. `effops.memory` predicts the memory of training, and `effops.measure`
measures what runs.
"""

import importlib
from typing import TYPE_CHECKING, Any

from effops import distributions, nn
from effops.dispatch.choice import use_variant, variants
from effops.dispatch.explain import Explanation, VariantReport, explain
from effops.dispatch.record import record
from effops.dispatch.validation import validate
from effops.ops.attention.additive import additive_attention, additive_attention_scores
from effops.ops.attention.dot_product import attention, attention_scores, attention_weights
from effops.ops.attention.log_sparse import log_sparse_attention
from effops.ops.broadcast_dot import broadcast_dot
from effops.ops.densities.normal import normal_log_prob, normal_mixture_log_prob
from effops.ops.densities.power_spherical import power_spherical_log_prob, power_spherical_mixture_log_prob
from effops.ops.densities.von_mises_fisher import von_mises_fisher_log_prob, von_mises_fisher_mixture_log_prob
from effops.ops.einsum.contraction import einsum
from effops.patch import patch_power_spherical
from effops.text import missing_name
from effops.transformers import register_transformers

if TYPE_CHECKING:
    from effops.programs.comparison import compare as compare
    from effops.programs.large_lines import lint as lint
    from effops.programs.limits_of_memory import MemoryBudgetExceeded as MemoryBudgetExceeded
    from effops.programs.limits_of_memory import budget as budget
    from effops.programs.tiles.function import tiled as tiled
    from effops.programs.tiles.refusals import CannotTile as CannotTile
    from effops.programs.tiles.refusals import TilesDiffer as TilesDiffer

__version__ = "0.1.0"

__all__ = [
    "Explanation",
    "VariantReport",
    "__version__",
    "additive_attention",
    "additive_attention_scores",
    "attention",
    "attention_scores",
    "attention_weights",
    "broadcast_dot",
    "distributions",
    "einsum",
    "explain",
    "log_sparse_attention",
    "nn",
    "normal_log_prob",
    "normal_mixture_log_prob",
    "patch_power_spherical",
    "power_spherical_log_prob",
    "power_spherical_mixture_log_prob",
    "record",
    "register_transformers",
    "use_variant",
    "validate",
    "variants",
    "von_mises_fisher_log_prob",
    "von_mises_fisher_mixture_log_prob",
]

_WHEN_ASKED_FOR = ("measure", "memory")  # public modules that `import effops` does not import
_NAMES_WHEN_ASKED_FOR = {  # of `programs`
    "CannotTile": "tiles.refusals",
    "MemoryBudgetExceeded": "limits_of_memory",
    "TilesDiffer": "tiles.refusals",
    "budget": "limits_of_memory",
    "compare": "comparison",
    "lint": "large_lines",
    "tiled": "tiles.function",
}


def __getattr__(name: str) -> Any:
    if name in _WHEN_ASKED_FOR:
        return importlib.import_module(f"effops.{name}")
    if name in _NAMES_WHEN_ASKED_FOR:
        return getattr(importlib.import_module(f"effops.programs.{_NAMES_WHEN_ASKED_FOR[name]}"), name)
    raise missing_name(__name__, name, __dir__(), ("distributions", "nn", *_WHEN_ASKED_FOR))


def __dir__() -> list[str]:
    return sorted([*__all__, *_WHEN_ASKED_FOR, *_NAMES_WHEN_ASKED_FOR])
