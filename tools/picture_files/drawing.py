# SPDX-License-Identifier: Apache-2.0
"""The drawing of what terarec is: the way of a log to a score, in training above and in serving below."""

from __future__ import annotations

from html import escape

from tools.picture_files.palette import as_file

WIDTH, HEIGHT = 960, 352
LEFT, TOP, BOTTOM = 96, 40, 222
BOX, GAP, TALL = 142, 30, 74

TRAINING = (
    ("raw logs", "text, JSON, Parquet,", "Arrow; disk or URL"),
    ("workflow", "operators, fitted", "by terarec prepare"),
    ("tables", "embedding rows, exact", "fused updates"),
    ("layers", "DLRM, DCN, DIN, ...,", "your own module"),
    ("loss", "terarec train:", "metrics, report"),
)
SERVING = (
    ("one record", "raw values,", "over HTTP or in Python"),
    ("same workflow", "the same ids", "from raw values"),
    ("same rows", "caches, live updates,", "parameter server"),
    ("same layers", "torch, ONNX Runtime,", "OpenVINO; int8"),
    ("score", "terarec serve,", "terarec predict"),
)
SAVED = {1: "workflow.json", 2: "checkpoint, delta", 3: "checkpoint, export"}
MEMORIES = {TOP: ("device", "host", "disk"), BOTTOM: ("host", "Redis", "disk")}


def drawing() -> str:
    """Return the drawing as an SVG file."""
    parts = [
        _text(LEFT - 18, TOP + TALL / 2 + 4, "training", "lane"),
        _text(LEFT - 18, BOTTOM + TALL / 2 + 4, "serving", "lane"),
    ]
    for top, lane in ((TOP, TRAINING), (BOTTOM, SERVING)):
        for index, (title, first, second) in enumerate(lane):
            parts += _box(index, top, title, (first, second))
            if index:
                parts.append(_arrow(_left(index) - GAP + 3, top + TALL / 2, _left(index) - 3, top + TALL / 2))
    parts += _gradients() + _memories(TOP) + _memories(BOTTOM)
    for index, label in SAVED.items():
        middle = _left(index) + BOX / 2
        parts.append(_arrow(middle, TOP + TALL + (33 if index == 2 else 3), middle, BOTTOM - 3))
        parts.append(_text(middle + 8, BOTTOM - 20, label, "note start"))
    body = "\n".join(parts)
    return as_file(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="The way of a log to a score">\n<style>{_STYLE}</style>\n{_HEAD}\n{body}\n</svg>\n'
    )


_STYLE = """
rect { fill: none; stroke: var(--blue); stroke-width: 1.5; } rect.memory { stroke: var(--orange); }
line, path.way { fill: none; stroke: var(--muted); stroke-width: 1.5; } path.back { stroke-dasharray: 4 3; }
text { text-anchor: middle; fill: var(--muted); font-size: 11.5px; }
text.title { fill: var(--ink); font-size: 15px; font-weight: 600; }
text.lane { text-anchor: end; fill: var(--ink); font-size: 14px; } text.start { text-anchor: start; }
path.head { fill: var(--muted); stroke: none; }
"""
_HEAD = (
    '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto" '
    'markerUnits="userSpaceOnUse"><path class="head" d="M0 0 L8 4 L0 8 z"/></marker>'
)


def _left(index: int) -> float:
    return LEFT + index * (BOX + GAP)


def _box(index: int, top: float, title: str, lines: tuple[str, str]) -> list[str]:
    middle = _left(index) + BOX / 2
    parts = [f'<rect x="{_left(index):g}" y="{top:g}" width="{BOX}" height="{TALL}" rx="8"/>']
    parts.append(_text(middle, top + 25, title, "title"))
    return parts + [_text(middle, top + 45 + 16 * row, line, "") for row, line in enumerate(lines) if line]


def _memories(below: float) -> list[str]:
    """Return the memories of tables larger than one: a strip below the box of the tables."""
    top, names = below + TALL + 6, MEMORIES[below]
    wide = BOX / len(names)
    parts = []
    for place, name in enumerate(names):
        left = _left(2) + place * wide
        parts.append(f'<rect class="memory" x="{left:g}" y="{top:g}" width="{wide:g}" height="24"/>')
        parts.append(_text(left + wide / 2, top + 16, name, ""))
    return parts


def _gradients() -> list[str]:
    """Return the dashed way of gradients from the loss to the layers and tables."""
    loss, top = _left(4) + BOX / 2, TOP - 18
    ends = [_left(index) + BOX / 2 for index in (2, 3)]
    ways = [f"M{loss:g} {TOP - 3} V{top} H{end:g} V{TOP - 4}" for end in ends]
    return [
        *(f'<path class="way back" d="{way}" marker-end="url(#head)"/>' for way in ways),
        _text((ends[0] + ends[1]) / 2, top - 6, "gradients", ""),
    ]


def _arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" marker-end="url(#head)"/>'


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(text)}</text>'
