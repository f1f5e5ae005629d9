"""Draw the map of docs/protocols.md: when a step is taken, and what is remembered.

python docs/protocol_map.py > docs/protocol-map.svg
"""

from __future__ import annotations

WHEN = ["at the end", "when all have reported", "after an interval", "after the first C·m", "when a group is in",
        "after K updates", "at every update"]  # fmt: skip
WHAT = ["nothing", "the latest model\nof every client", "the latest change\nof every client", "... and its base"]
PROTOCOLS: dict[str, tuple[int, int]] = {
    "local": (0, 1),
    "fedavg": (1, 0),
    "fedcs": (1, 0),
    "timelyfl": (2, 0),
    "safa": (3, 1),
    "fedcompass": (4, 0),
    "fedbuff": (5, 0),
    "fedsecant": (5, 3),
    "fedasync": (6, 0),
}
"""The column and the row of each protocol with its own aggregator."""
AGGREGATORS: dict[str, int] = {
    "mean, population, mixing, buffer, refl, robust means": 0,
    "cache, own": 1,
    "mifa, fedvarp, ca2fl, fedstale, scaffold": 2,
    "secant": 3,
}
"""The row that an aggregator moves a protocol to."""
COLUMN, ROW, LEFT, TOP = 108, 74, 140, 34


def draw() -> str:
    """The map as SVG."""
    width, height = LEFT + COLUMN * len(WHEN), TOP + ROW * len(WHAT)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width + 300} {height + 54}" '
        'font-family="system-ui, sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="20" fill="#555">what is remembered, by when a step is taken</text>',
        f'<text x="{width + 16}" y="20" fill="#555">aggregators of this row</text>',
    ]
    for row, name in enumerate(reversed(WHAT)):
        y = TOP + ROW * row
        parts.append(
            f'<rect x="{LEFT}" y="{y}" width="{COLUMN * len(WHEN)}" height="{ROW - 4}" rx="4" fill="#f0f2f5"/>'
        )
        parts += [_text(LEFT - 10, y + 30 + 16 * k, line, "end") for k, line in enumerate(name.split("\n"))]
    parts += [_text(LEFT + COLUMN * (k + 0.5), height + 16 + 15 * n, line) for k, name in enumerate(WHEN)
              for n, line in enumerate(_broken(name))]  # fmt: skip
    for place in dict.fromkeys(PROTOCOLS.values()):
        names = [name for name, other in PROTOCOLS.items() if other == place]
        x, y = LEFT + COLUMN * (place[0] + 0.5), _top(place[1]) + 40 - 10 * len(names)
        for k, name in enumerate(names):
            weight = "bold" if name == "fedsecant" else "normal"
            parts.append(_text(x, y + 20 * k + 4, name, colour="#0072b2", weight=weight))
    for names, row in AGGREGATORS.items():
        parts += [
            _text(width + 16, _top(row) + 24 + 16 * k, line, "start") for k, line in enumerate(_broken(names, 36))
        ]
    return "\n".join([*parts, "</svg>"])


def _top(row: int) -> int:
    return TOP + ROW * (len(WHAT) - 1 - row)


def _broken(text: str, most: int = 15) -> list[str]:
    """A text in lines of about so many letters."""
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + len(word) >= most:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def _text(x: float, y: float, text: str, anchor: str = "middle", colour: str = "#333", weight: str = "normal") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{colour}" font-weight="{weight}">{text}</text>'


if __name__ == "__main__":
    print(draw())
