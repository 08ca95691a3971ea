"""Costs of all pairs of boxes: few coordinates, so that the pairs of one coordinate are a large part of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..program import Expected, Program

ROWS = 64  # of a block of the mended programs


def absolute_cost(boxes: Tensor, targets: Tensor) -> Tensor:
    return (boxes[:, None] - targets).abs().sum(-1)


def absolute_cost_mended(boxes: Tensor, targets: Tensor) -> Tensor:
    cost = (boxes[:, 0, None] - targets[:, 0]).abs_()
    for i in range(1, boxes.shape[1]):
        cost += (boxes[:, i, None] - targets[:, i]).abs_()
    return cost


def areas(boxes: Tensor) -> Tensor:
    return (boxes[:, 2:] - boxes[:, :2]).prod(1)


def overlaps(boxes: Tensor, targets: Tensor) -> Tensor:
    sides = torch.min(boxes[:, None, 2:], targets[:, 2:]) - torch.max(boxes[:, None, :2], targets[:, :2])
    shared = sides.clamp(min=0).prod(-1)
    return shared / (areas(boxes)[:, None] + areas(targets) - shared)


def matched_targets(anchors: Tensor, targets: Tensor) -> Tensor:
    return overlaps(anchors, targets).argmax(1)


def matched_targets_mended(anchors: Tensor, targets: Tensor) -> Tensor:
    return torch.cat([overlaps_of_coordinates(rows, targets).argmax(1) for rows in anchors.split(ROWS)])


def overlaps_of_coordinates(boxes: Tensor, targets: Tensor) -> Tensor:
    x, y = (
        (torch.min(boxes[:, i + 2, None], targets[:, i + 2]) - torch.max(boxes[:, i, None], targets[:, i])).clamp(min=0)
        for i in range(2)
    )
    shared = x * y
    return shared / (areas(boxes)[:, None] + areas(targets) - shared)


def detection_cost(logits: Tensor, boxes: Tensor, classes: Tensor, targets: Tensor) -> Tensor:
    corners, others = boxes[:, None], targets
    inner = (torch.min(corners[..., 2:], others[:, 2:]) - torch.max(corners[..., :2], others[:, :2])).clamp(min=0)
    outer = (torch.max(corners[..., 2:], others[:, 2:]) - torch.min(corners[..., :2], others[:, :2])).clamp(min=0)
    shared, hull = inner.prod(-1), outer.prod(-1)
    union = areas(boxes)[:, None] + areas(targets) - shared
    generalised = shared / union - (hull - union) / hull
    return 5 * torch.cdist(boxes, targets, p=1) - logits.softmax(-1)[:, classes] - 2 * generalised


def detection_cost_mended(logits: Tensor, boxes: Tensor, classes: Tensor, targets: Tensor) -> Tensor:
    def of_rows(logits: Tensor, boxes: Tensor) -> Tensor:
        return detection_cost(logits, boxes, classes, targets)

    cost = logits.new_empty(len(boxes), len(targets))
    for part, rows, cells in zip(logits.split(ROWS), boxes.split(ROWS), cost.split(ROWS), strict=True):
        cells.copy_(of_rows(part, rows))
    return cost


def random_boxes(n: int) -> Tensor:
    start = torch.rand(n, 2)
    return torch.cat([start, start + 0.05 + torch.rand(n, 2)], 1)


def boxes_and_targets(n: int, m: int) -> tuple[Any, ...]:
    return random_boxes(n), random_boxes(m)


def detections(n: int, m: int, classes: int) -> tuple[Any, ...]:
    return torch.randn(n, classes), random_boxes(n), torch.arange(m) % classes, random_boxes(m)


PROGRAMS = (
    Program(
        "absolute_cost",
        "https://github.com/roboflow/rf-detr/pull/1486",
        absolute_cost,
        boxes_and_targets,
        sizes={"n": 31_200, "m": 4_000},
        small={"n": 2_000, "m": 1_200},
        expected=(
            Expected(
                "(boxes[:, None] - targets).abs()",
                now=lambda s: 4 * s["n"] * s["m"] * 4,
                after=lambda s: 4 * s["n"] * s["m"],
            ),
        ),
        mended=absolute_cost_mended,
        note="four times the result: torch.cdist(p=1) takes 15 to 29 times as long on a GPU, so it is no fix",
    ),
    Program(
        "matched_targets",
        "https://github.com/pytorch/vision/issues/7959",
        matched_targets,
        boxes_and_targets,
        sizes={"n": 242_991, "m": 1_000},
        small={"n": 8_000, "m": 500},
        expected=(
            Expected(
                "torch.min(boxes[:, None, 2:], targets[:, 2:]) - torch.max(boxes[:, None, :2], targets[:, :2])",
                now=lambda s: 4 * s["n"] * s["m"] * 2,
                after=lambda s: 4 * ROWS * s["m"],
            ),
        ),
        mended=matched_targets_mended,
    ),
    Program(
        "detection_cost",
        "https://github.com/facebookresearch/detr/blob/main/models/matcher.py",
        detection_cost,
        detections,
        sizes={"n": 8_192, "m": 2_048, "classes": 92},
        small={"n": 2_400, "m": 1_000, "classes": 92},
        expected=(
            Expected(
                "torch.min(corners[..., 2:], others[:, 2:]) - torch.max(corners[..., :2], others[:, :2])",
                now=lambda s: 4 * s["n"] * s["m"] * 2,
                after=lambda s: 4 * s["n"] * s["m"],
            ),
            Expected(
                "torch.max(corners[..., 2:], others[:, 2:]) - torch.min(corners[..., :2], others[:, :2])",
                now=lambda s: 4 * s["n"] * s["m"] * 2,
                after=lambda s: 4 * s["n"] * s["m"],
            ),
        ),
        mended=detection_cost_mended,
        note="the result is half of the largest tensor: what is saved are the dozen tensors of its size",
    ),
)
