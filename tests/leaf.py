"""Small data in LEAF's format, made here: 50 users, some of them fond of some letters or classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

USERS = [f"user_{number:02}" for number in range(50)]
_LINE = "the quick brown fox jumps over the lazy dog, and then once more. "


def write(folder: Path, part: str, samples: dict[str, tuple[list[Any], list[Any]]], *, files: int = 2) -> None:
    """Write a part the way that LEAF does, its users dealt to several files."""
    (folder / part).mkdir(parents=True, exist_ok=True)
    for number, names in enumerate(np.array_split(np.array(list(samples)), files)):
        content = {
            "users": names.tolist(),
            "num_samples": [len(samples[name][1]) for name in names],
            "user_data": {name: dict(zip("xy", samples[name], strict=True)) for name in names.tolist()},
        }
        (folder / part / f"all_data_{number}.json").write_text(json.dumps(content))


def write_images(folder: Path) -> Path:
    """FEMNIST's format: 784 pixels and a class; a class is a bright row, and a user knows two classes."""
    rng = np.random.default_rng(0)
    for part, least in (("train", 4), ("test", 1)):
        samples = {}
        for number, user in enumerate(USERS):
            labels = (2 * number + rng.integers(2, size=least + number % 4)) % 10
            pixels = rng.uniform(0, 0.2, (len(labels), 28, 28)).round(2)
            pixels[np.arange(len(labels)), 2 * labels + 4] = 1.0
            samples[user] = (pixels.reshape(len(labels), 784).tolist(), labels.tolist())
        write(folder, part, samples)
    return folder


def write_texts(folder: Path, *, length: int = 80) -> Path:
    """Shakespeare's format: 80 characters and the one that follows, from different places of a line."""
    for part, first, least in (("train", 0, 4), ("test", 7, 1)):
        samples = {}
        for number, user in enumerate(USERS):
            text = _LINE * 4
            places = [(first + 3 * number + 5 * k) % len(_LINE) for k in range(least + number % 4)]
            samples[user] = ([text[at : at + length] for at in places], [text[at + length] for at in places])
        write(folder, part, samples)
    return folder
