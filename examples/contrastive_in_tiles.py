"""A contrastive loss as it is usually written, run within a budget: `effops.tiled` cuts it, and leaves its code alone.

Loss and gradients are those of the function as it is, and the logits of all pairs are never held at once.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

import effops
from effops.measure import Pass, memory

PAIRS, FEATURES, BUDGET = 3072, 64, "4 MiB"


def info_nce(images: Tensor, texts: Tensor, temperature: float = 0.07) -> Tensor:
    """InfoNCE of pairs: each image shall find its text among all of them."""
    logits = normalize(images, dim=-1) @ normalize(texts, dim=-1).T / temperature
    return cross_entropy(logits, torch.arange(len(images), device=images.device))


def with_gradients(loss: Callable[..., Tensor], images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    found = loss(images, texts)
    return found.detach(), *torch.autograd.grad(found, (images, texts))


def main() -> None:
    torch.manual_seed(0)
    images = torch.randn(PAIRS, FEATURES)
    texts = images + 2 * torch.randn(PAIRS, FEATURES)
    images, texts = images.requires_grad_(), texts.requires_grad_()
    in_tiles = effops.tiled(info_nce, budget=BUDGET)
    print(effops.explain(in_tiles, images, texts))

    whole, tiled = (with_gradients(loss, images, texts) for loss in (info_nce, in_tiles))
    print(f"loss: as it is {whole[0]:.6f}, in tiles {tiled[0]:.6f}")
    for name, one, other in zip(("images", "texts"), whole[1:], tiled[1:]):
        print(f"gradients of {name}: largest {one.abs().max():.1e}, largest difference {(one - other).abs().max():.1e}")
    for name, loss in (("as it is", info_nce), ("in tiles", in_tiles)):
        work = Pass(lambda *given, loss=loss: with_gradients(loss, *given), (images, texts))
        print(f"{name}: {memory(work).temporary_bytes:,} bytes beside operands and gradients, measured")


if __name__ == "__main__":
    main()
