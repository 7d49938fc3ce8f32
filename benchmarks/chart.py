"""
The chart of one report: how fast one worker process drains a queue, a panel a database.
"""

from __future__ import annotations

from html import escape
from typing import Any

from .arena import OURS, RAW, RAW_LARGE
from .rounds import w3

WIDTH, LEFT, RIGHT = 780, 220, 90
BAR, STEP, HEAD = 14, 20, 38
NAMES = {"postgresql": "PostgreSQL", "mysql": "MySQL", "mariadb": "MariaDB", "sqlite": "SQLite"}

# Both colour schemes: whoever shows the picture as an image passes on what the reader has chosen.
STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #24292f }
  .title { font-weight: 600; font-size: 14px }
  .small { fill: #57606a; font-size: 11px }
  .ours { fill: #1f7a4d } .peer { fill: #b4690e } .hand { fill: #8c959f }
  .axis { stroke: #8c959f }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .small { fill: #9198a1 }
    .ours { fill: #3fb950 } .peer { fill: #d29922 } .hand { fill: #6e7681 }
  }
"""


def draw(report: dict[str, Any]) -> str:
    """
    An SVG without a background, for light and dark pages.
    """
    shown = [figure for figure in report["figures"] if figure["workload"] == w3(1)]
    parts: list[str] = []
    top = 34
    for database in dict.fromkeys(figure["database"] for figure in shown):
        figures = sorted((figure for figure in shown if figure["database"] == database), key=lambda figure: -float(figure["median"]))
        title = f"{NAMES[database]} {report['databases'][database]}"
        parts.append(panel(title, figures, top))
        top += HEAD + STEP * len(figures)
    peers = ", ".join(f"{name} {version}" for name, version in report["peers"].items())
    notes = [
        f"Medians of {report['options']['runs']}. {report['cores']} cores for workers and server; {report['disk']}. {report['date']}.",
        f"Loops by hand (grey) keep none of the promises. {peers}",
    ]
    lines = "".join(f'<text class="small" x="8" y="{top + 18 + 16 * place}">{escape(note)}</text>' for place, note in enumerate(notes))
    height = top + 16 * len(notes) + 14
    head = '<text class="title" x="8" y="20">Draining a full queue with one worker process, jobs a second</text>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img">'
        f"<title>Jobs a second that one worker process drains</title><style>{STYLE}</style>{head}{''.join(parts)}{lines}</svg>\n"
    )


def panel(title: str, figures: list[dict[str, Any]], top: int) -> str:
    most = max(float(figure["median"]) for figure in figures)
    bars = "".join(bar(figure, most, top + HEAD + STEP * place) for place, figure in enumerate(figures))
    bottom = top + HEAD + STEP * len(figures) - 4
    axis = f'<line class="axis" x1="{LEFT}" y1="{top + HEAD - 4}" x2="{LEFT}" y2="{bottom}"/>'
    return f'<text class="title" x="8" y="{top + 26}">{escape(title)}</text>{bars}{axis}'


def bar(figure: dict[str, Any], most: float, y: int) -> str:
    label = figure["contestant"]
    kind = "ours" if label == OURS else "hand" if label in (RAW, RAW_LARGE) or label.startswith("Core") else "peer"
    length = max((WIDTH - LEFT - RIGHT) * float(figure["median"]) / most, 1)
    weight = ' font-weight="600"' if kind == "ours" else ""
    return (
        f'<text x="{LEFT - 8}" y="{y + 11}" text-anchor="end"{weight}>{escape(label)}</text>'
        f'<rect class="{kind}" x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR}" rx="2"/>'
        f'<text x="{LEFT + length + 6:.1f}" y="{y + 11}"{weight}>{figure["median"]:,.0f}</text>'
    )
