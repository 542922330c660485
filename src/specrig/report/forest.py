"""The interval plot: a line per method and cell on a logarithmic speed-up axis, inline SVG in the theme."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

LEFT, RIGHT, ROW, GAP, FOOT, WIDTH = 350, 70, 22, 10, 34, 960
TICKS = (0.1, 0.2, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 50, 100)


def forest(rows: Sequence[dict[str, Any]], margin: float, title: str) -> str:
    """SVG of ``rows`` (group, method, value, low, high, class, text); empty for no rows.

    Intervals that leave the axis end in an arrow; the band around 1 is the margin of the verdict.
    """
    if not rows:
        return ""
    low, high = _range(rows)
    span = math.log(high / low)

    def x(value: float) -> float:
        bounded = min(max(value, low), high)
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log(bounded / low) / span

    out: list[str] = []
    y = 8.0
    body: list[str] = []
    group = None
    for row in rows:
        if row["group"] != group:
            group = row["group"]
            y += GAP if body else 0
            body.append(f'<text class="g" x="0" y="{y + ROW / 2 + 4:.1f}">{html.escape(group)}</text>')
        mid = y + ROW / 2
        body.append(
            f'<text class="m" x="{LEFT - 12}" y="{mid + 4:.1f}" text-anchor="end">{_short(row["method"])}</text>'
        )
        if row["low"] is not None and row["high"] is not None:
            a, b = x(row["low"]), x(row["high"])
            body.append(f'<line class="i v-{row["class"]}" x1="{a:.1f}" x2="{b:.1f}" y1="{mid:.1f}" y2="{mid:.1f}"/>')
            for end, at, outside in ((row["low"], a, row["low"] < low), (row["high"], b, row["high"] > high)):
                tip = 5 if end == row["high"] else -5
                if outside:
                    points = f"{at + tip:.1f},{mid:.1f} {at:.1f},{mid - 4:.1f} {at:.1f},{mid + 4:.1f}"
                    body.append(f'<polygon class="d v-{row["class"]}" points="{points}"/>')
                else:
                    body.append(
                        f'<line class="i v-{row["class"]}" x1="{at:.1f}" x2="{at:.1f}" '
                        f'y1="{mid - 4:.1f}" y2="{mid + 4:.1f}"/>'
                    )
        body.append(f'<circle class="d v-{row["class"]}" cx="{x(row["value"]):.1f}" cy="{mid:.1f}" r="4.2"/>')
        body.append(f'<text class="n" x="{WIDTH}" y="{mid + 4:.1f}" text-anchor="end">{row["text"]}</text>')
        y += ROW
    height = y + FOOT
    band_a, band_b = x(1 / (1 + margin)), x(1 + margin)
    if low < 1 < high:
        out.append(
            f'<rect class="band" x="{band_a:.1f}" y="0" width="{max(1.0, band_b - band_a):.1f}" height="{y + 4:.1f}"/>'
        )
    last = -math.inf
    for tick in TICKS:
        if not low <= tick <= high or x(tick) - last < 34:
            continue
        last = x(tick)
        kind = "one" if tick == 1 else "t"
        out.append(f'<line class="{kind}" x1="{last:.1f}" x2="{last:.1f}" y1="0" y2="{y + 4:.1f}"/>')
        out.append(f'<text class="a" x="{last:.1f}" y="{y + 20:.1f}" text-anchor="middle">{tick:g}×</text>')
    label = html.escape(title)
    return (
        f'<svg class="forest" viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{label}">'
        f"<title>{label}</title>{''.join(out)}{''.join(body)}</svg>"
    )


def _range(rows: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Axis ends: all points, 1, and the intervals as far as they are not absurdly wide."""
    points = [row["value"] for row in rows] + [1.0]
    lows = [row["low"] for row in rows if row["low"] is not None]
    highs = [row["high"] for row in rows if row["high"] is not None]
    low = max(min([*points, *lows]), min(points) / 2.5)
    high = min(max([*points, *highs]), max(points) * 2.5)
    return low / 1.08, high * 1.08


def _short(name: str) -> str:
    return html.escape(name if len(name) <= 16 else name[:15] + "…")
