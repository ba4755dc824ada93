"""Draws a table of speeds as bars: the README's picture. benchmarks/make_tables.py calls it.

Each row is an engine, and each column a workload. Within a column the length of a bar is proportional to its number.
The bars of this engine are blue.
"""

from html import escape

from benchmarks.figures import Table

LEFT = 180
TOP = 60
ROW = 21
COLUMN = 170
LONGEST = 110


def draw(title: str, table: Table) -> str:
    """Return the picture as an SVG document.

    The name of an engine ends at the first colon of its row. Each of its cells has one figure.
    """
    rows = {name.partition(":")[0]: [cell.figures[0] for cell in cells if cell] for name, cells in table.rows.items()}
    width = LEFT + COLUMN * len(table.columns)
    height = TOP + ROW * len(rows) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12" fill="#24292f">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="10" y="20" font-size="13">{escape(title)}</text>',
    ]
    for row, name in enumerate(rows):
        y = TOP + ROW * row
        parts.append(f'<text x="{LEFT - 8}" y="{y + 13}" text-anchor="end"{_weight(name)}>{escape(name)}</text>')
    for column, workload in enumerate(table.columns):
        x = LEFT + COLUMN * column
        parts.append(f'<text x="{x}" y="{TOP - 12}" fill="#57606a">{escape(workload)}</text>')
        most = max(float(numbers[column]) for numbers in rows.values())
        for row, (name, numbers) in enumerate(rows.items()):
            y = TOP + ROW * row
            length = LONGEST * float(numbers[column]) / most
            color = "#0072b2" if _is_ours(name) else "#b6bdc5"
            parts.append(f'<rect x="{x}" y="{y}" width="{length:.1f}" height="{ROW - 5}" fill="{color}"/>')
            parts.append(f'<text x="{x + length + 5:.1f}" y="{y + 13}"{_weight(name)}>{numbers[column]}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _is_ours(name: str) -> bool:
    return name.startswith("ours")


def _weight(name: str) -> str:
    return ' font-weight="bold"' if _is_ours(name) else ""
