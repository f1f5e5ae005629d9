"""Draw the picture of the README: who did what, round by round, in a small run.

python docs/client_map.py > docs/client-map.svg
"""

from __future__ import annotations

from collections.abc import Sequence

from safa import RoundRecord, Settings, run_rounds

SETTINGS = Settings.of("mnist", clients=8, rounds=16, fraction=0.3, crash_rate=0.3, lag_tolerance=3, seed=11)
ROW, LEFT, TOP, WIDTH = 26, 76, 30, 760
COLOURS = {"picked": "#1b9e5a", "undrafted": "#3b78c9", "crashed": "#d1495b", "at work": "#c9ced6"}


def fates(records: Sequence[RoundRecord]) -> list[list[tuple[str, bool]]]:
    """For every round and client: what became of it, and whether it had to start over."""
    table = []
    for record in records:
        fate = ["at work"] * record.clients
        for name, clients in (("crashed", record.crashed), ("undrafted", record.undrafted), ("picked", record.picked)):
            for client in clients:
                fate[client] = name
        deprecated = set(record.deprecated.tolist())
        table.append([(name, client in deprecated) for client, name in enumerate(fate)])
    return table


def draw(records: Sequence[RoundRecord]) -> str:
    """The map as SVG; a column is as wide as its round is long."""
    scale = WIDTH / records[-1].closed_s
    height = TOP + ROW * SETTINGS.clients
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 14} {height + 62}" '
        'font-family="system-ui, sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="18" fill="#333">{SETTINGS.rounds} rounds of SAFA, {SETTINGS.clients} clients, '
        f"C = {SETTINGS.fraction:g}, crash rate {SETTINGS.crash_rate:g}, tau = {SETTINGS.lag_tolerance}</text>",
    ]
    parts += [
        f'<text x="{LEFT - 10}" y="{TOP + ROW * client + 18}" text-anchor="end">client {client}</text>'
        for client in range(SETTINGS.clients)
    ]
    for record, row in zip(records, fates(records), strict=True):
        x, width = LEFT + record.opened_s * scale, record.length_s * scale
        for client, (name, deprecated) in enumerate(row):
            stroke = ' stroke="#222" stroke-width="1.5"' if deprecated else ""
            parts.append(
                f'<rect x="{x + 1:.1f}" y="{TOP + ROW * client + 2}" width="{max(1.0, width - 2):.1f}" '
                f'height="{ROW - 4}" rx="2" fill="{COLOURS[name]}"{stroke}/>'
            )
    minutes = records[-1].closed_s / 60
    parts.append(f'<text x="{LEFT}" y="{height + 18}" fill="#555">0</text>')
    parts.append(f'<text x="{LEFT + WIDTH}" y="{height + 18}" text-anchor="end" fill="#555">{minutes:.0f} min</text>')
    legend = [*COLOURS.items(), ("starts over", "none")]
    for place, (name, colour) in enumerate(legend):
        x, y, stroke = LEFT + 120 * place, height + 34, ' stroke="#222" stroke-width="1.5"' if colour == "none" else ""
        parts.append(f'<rect x="{x}" y="{y}" width="14" height="14" rx="2" fill="{colour}"{stroke}/>')
        parts.append(f'<text x="{x + 20}" y="{y + 12}" fill="#333">{name}</text>')
    return "\n".join([*parts, "</svg>"])


if __name__ == "__main__":
    print(draw(list(run_rounds(SETTINGS))))
