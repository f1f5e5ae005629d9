"""What the tasks call accuracy: the three formulas of the paper's Table III, from (output, target)."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["closeness", "share_right", "share_right_side"]


def closeness(output: Tensor, target: Tensor) -> Tensor:
    """Task 1: one minus the mean of |y - y'| / max(y, y').

    Table III leaves two cases open, for labels start at 0. Where label and output are both 0, the ratio is 0: that is
    exact. Where neither is above 0 otherwise, it is 1: the sample adds nothing to the accuracy. An output below 0 with
    a label above 0 follows the formula, and then its ratio is more than 1.
    """
    output = output.reshape(target.shape)
    larger = torch.maximum(output, target)
    difference = (output - target).abs()
    ratio = torch.where(larger > 0, difference / larger, (difference > 0).to(difference.dtype))
    return 1 - ratio.mean()


def share_right(output: Tensor, target: Tensor) -> Tensor:
    """Task 2: the share of samples whose label has the largest output."""
    return (output.argmax(dim=-1) == target).float().mean()


def share_right_side(output: Tensor, target: Tensor) -> Tensor:
    """Task 3: the mean of max(0, sign(y y')), labels being -1 and +1; an output of 0 is on neither side."""
    return (output.reshape(target.shape) * target > 0).float().mean()
