"""Exchanges layers of attention of a model for those of effops."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from effops.nn import MultiheadAttention


@dataclass(frozen=True)
class Swapped:
    """Builds a model whose layers of `torch.nn.MultiheadAttention` are effops'.

    Two of the same model are equal, as two functions are not, and so are workloads with them: each is predicted once.
    """

    model: Callable[[], nn.Module]

    def __call__(self) -> nn.Module:
        model = self.model()
        if is_swappable(model):
            return _swapped(model)
        for parent in list(model.modules()):
            for name, child in parent.named_children():
                if is_swappable(child):
                    setattr(parent, name, _swapped(child))
        return model


def is_swappable(module: nn.Module) -> bool:
    """Whether effops has a layer of the same state for this one."""
    return type(module) is nn.MultiheadAttention and module.bias_k is None and not module.add_zero_attn


def _swapped(layer: nn.Module) -> MultiheadAttention:
    assert isinstance(layer, nn.MultiheadAttention)
    return MultiheadAttention(
        layer.embed_dim,
        layer.num_heads,
        layer.dropout,
        layer.in_proj_bias is not None,
        kdim=layer.kdim,
        vdim=layer.vdim,
        batch_first=layer.batch_first,
        device=layer.out_proj.weight.device,
        dtype=layer.out_proj.weight.dtype,
    )
