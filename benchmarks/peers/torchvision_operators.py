"""Lets torchvision be imported beside a torch without CUDA: import this before anything that imports torchvision.

torchvision's compiled part needs the CUDA libraries of the torch that it was built with. Without it, its import fails
at two operators for which it wants to register shapes. They are declared here and never called: no job uses them.
"""

from __future__ import annotations

import torch

LIBRARY = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
