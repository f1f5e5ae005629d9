"""Metrics to choose from: each gives a number, or one for each class, from (output, target) of a whole set.

Outputs of a classifier have the classes along their second dimension, as torch's `cross_entropy` takes them; targets
are the numbers of classes. A measure that the samples do not define, such as the recall of a class that none of them
has, is NaN. `closeness`, `accuracy` and `share_right_side` are what the paper's Table III calls the accuracy of its
Tasks 1 to 3.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from safa.tasks.problem import Metric

__all__ = ["accuracy", "auc", "closeness", "f1", "perplexity", "recall_per_class", "share_right_side"]


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


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """Task 2: the share of samples whose class has the largest output."""
    return (output.argmax(dim=1) == target).float().mean()


def share_right_side(output: Tensor, target: Tensor) -> Tensor:
    """Task 3: the mean of max(0, sign(y y')), labels being -1 and +1; an output of 0 is on neither side."""
    return (output.reshape(target.shape) * target > 0).float().mean()


def auc(output: Tensor, target: Tensor) -> Tensor:
    """The area under the ROC curve of two classes: how likely a positive sample is ranked above a negative one.

    An equal rank counts half. Samples with a target above 0 are the positive ones. The output is a number for each
    sample, or one for each of the two classes.
    """
    scores = output[:, 1] - output[:, 0] if output.ndim > 1 and output.shape[1] == 2 else output.flatten()
    positive = target.flatten() > 0
    positives = positive.sum().double()
    _, place, count = torch.unique(scores, return_inverse=True, return_counts=True)
    ranks = (count.cumsum(0) - (count - 1) / 2).double()[place]
    above = ranks[positive].sum() - positives * (positives + 1) / 2
    area = above / (positives * (len(positive) - positives))
    return torch.where(scores.isnan().any(), torch.nan, area)


def f1(output: Tensor, target: Tensor) -> Tensor:
    """The mean, over the classes that samples have or are taken for, of the F1 score (macro average)."""
    right, had, taken_for = _counts(output, target)
    return (2 * right / (had + taken_for)).nanmean()


def recall_per_class(output: Tensor, target: Tensor) -> Tensor:
    """For each class, the share of its samples that are taken for it."""
    right, had, _ = _counts(output, target)
    return right / had


def _counts(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each class, how many samples are rightly taken for it, have it, and are taken for it."""
    classes, found, target = output.shape[1], output.argmax(dim=1).flatten(), target.flatten()
    sets = target[found == target], target, found
    right, had, taken_for = (torch.bincount(one, minlength=classes).double() for one in sets)
    return right, had, taken_for


def _perplexity(output: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(output, target).exp()


perplexity = Metric(_perplexity, higher_is_better=False)
"""The exponential of the mean cross-entropy, from logits or from logarithms of probabilities; lower is better."""
