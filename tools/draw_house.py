"""Draws the folders of each package and the imports between them, for docs/architecture.md.

`python -m tools.generate` writes docs/images/house-*.svg and the tables between the marks in
docs/architecture.md. It fails if imports between folders form a cycle, or if a folder contains too many
files.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "core": "core/src/holdfast_core",
    "sidecar": "sidecar/src/holdfast_sidecar",
    "operator": "operator/src/holdfast_operator",
    "sdk": "trainer_sdk/src/holdfast",
}
PAGE = Path("docs/architecture.md")
BEGIN, END = "<!-- house: written by tools/draw_house.py -->", "<!-- /house -->"
MOST_FILES = 14
"""Maximum number of files in one folder, without its __init__.py."""
TOP = "."
WIDTH, HEIGHT, GAP_X, GAP_Y, MARGIN = 132, 40, 22, 46, 16


@dataclass(frozen=True)
class House:
    package: str
    files: dict[str, int]
    """The number of files in each folder. An __init__.py without code is not counted."""
    arrows: dict[str, frozenset[str]]
    """The folders that each folder imports."""
    says: dict[str, str]
    """The first sentence of each folder's docstring."""

    def floors(self) -> dict[str, int]:
        """Return the floor of each folder: 1 if it imports no other, else one above its highest import."""
        underway: set[str] = set()

        @cache
        def floor(folder: str) -> int:
            if folder in underway:
                sys.exit(f"{self.package}: {folder} is part of a circle of imports")
            underway.add(folder)
            found = 1 + max((floor(other) for other in self.arrows[folder]), default=0)
            underway.discard(folder)
            return found

        return {folder: floor(folder) for folder in self.files}

    def direct(self) -> set[tuple[str, str]]:
        """Return the imports that do not follow from a path through other folders."""

        @cache
        def below(folder: str) -> frozenset[str]:
            return frozenset().union(*({o, *below(o)} for o in self.arrows[folder]))

        return {
            (folder, other)
            for folder, others in self.arrows.items()
            for other in others
            if not any(other in below(between) for between in others if between != other)
        }


def read(package: str, folder: str) -> House:
    base = ROOT / folder
    name = base.name
    paths = sorted(base.rglob("*.py"))
    modules = {_module(path, base): path for path in paths}
    places = _places(modules, base)
    files: Counter[str] = Counter()
    arrows: dict[str, set[str]] = {}
    says: dict[str, str] = {}
    for module, path in modules.items():
        tree = ast.parse(path.read_text())
        place = places[module]
        arrows.setdefault(place, set())
        is_init = path.name == "__init__.py"
        if is_init or place.endswith(".py"):
            says[place] = _first_sentence(ast.get_docstring(tree) or "")
        if not is_init or len(tree.body) > 1:
            files[place] += 1
        for target in _imports(tree, modules):
            other = places[target]
            if other != place and target != name:
                arrows[place].add(other)
        if module.endswith("__main__"):
            says.setdefault(place, "")
    return House(
        package,
        {place: files[place] for place in arrows if files[place]},
        {place: frozenset(o for o in others if files[o]) for place, others in arrows.items()},
        says,
    )


def _module(path: Path, base: Path) -> str:
    parts = path.relative_to(base.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _places(modules: dict[str, Path], base: Path) -> dict[str, str]:
    """Return the place of each module: its folder.

    Where the folders stand on the files at the top, a file at the top that imports folders stands above them
    and is a place of its own.
    """
    places = {m: path.parent.relative_to(base).as_posix() for m, path in modules.items()}
    imports = {m: _imports(ast.parse(path.read_text()), modules) for m, path in modules.items()}
    tops = {m for m, path in modules.items() if places[m] == TOP and path.name != "__init__.py"}
    if any(imports[m] & tops for m in modules if places[m] != TOP):
        above = {m for m in tops if any(places[other] != TOP for other in imports[m])}
        places |= {m: modules[m].name for m in above}
    return places


def _imports(tree: ast.AST, modules: dict[str, Path]) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in modules else node.module)
    return found & set(modules)


def _shown(place: str) -> str:
    return place if place.endswith(".py") else f"{place}/"


def _first_sentence(text: str) -> str:
    return text.split("\n\n")[0].replace("\n", " ").split(". ")[0].rstrip(".")


def _rows(house: House) -> list[list[str]]:
    """Return the rows from the top floor down.

    Within a row, each folder is horizontally close to its imports and importers.
    """
    floors = house.floors()
    rows = [
        sorted(folder for folder, floor in floors.items() if floor == level)
        for level in range(max(floors.values()), 0, -1)
    ]
    for _ in range(6):
        spot = {f: i - len(row) / 2 for row in rows for i, f in enumerate(row)}
        for row in rows:
            row.sort(key=lambda folder: (_middle(folder, house, spot), folder))
    return rows


def _middle(folder: str, house: House, spot: dict[str, float]) -> float:
    near = [spot[o] for o in house.arrows[folder]]
    near += [spot[o] for o, others in house.arrows.items() if folder in others and o in spot]
    return sum(near) / len(near) if near else 0.0


def svg(house: House) -> str:
    """Return the drawing of the folders on their floors. The dark arrows suffice to reach every folder."""
    rows = _rows(house)
    wide = max(len(row) for row in rows)
    width = 2 * MARGIN + wide * WIDTH + (wide - 1) * GAP_X
    height = 2 * MARGIN + len(rows) * HEIGHT + (len(rows) - 1) * GAP_Y
    at: dict[str, tuple[float, float]] = {}
    for level, row in enumerate(rows):
        left = (width - len(row) * WIDTH - (len(row) - 1) * GAP_X) / 2
        # Rows are shifted, because arrows that skip a row would otherwise be hidden behind its boxes.
        shift = (level % 3 - 1) * 0.55 * WIDTH if len(row) < wide else 0.0
        for index, folder in enumerate(row):
            at[folder] = (left + shift + index * (WIDTH + GAP_X), MARGIN + level * (HEIGHT + GAP_Y))
    direct = house.direct()
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        "<!-- Written by tools/draw_house.py. Do not edit. -->",
        "<defs>"
        + "".join(
            f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0 0L8 4L0 8z" fill="{color}"/></marker>'
            for name, color in (("dark", "#33506e"), ("light", "#c9d3dd"))
        )
        + "</defs>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    pairs = sorted((a, b) for a, others in house.arrows.items() for b in others)
    for a, b in sorted(pairs, key=lambda pair: pair in direct):
        (x1, y1), (x2, y2) = at[a], at[b]
        name, color = ("dark", "#33506e") if (a, b) in direct else ("light", "#c9d3dd")
        lines.append(
            f'<path d="M{x1 + WIDTH / 2:.0f} {y1 + HEIGHT} L{x2 + WIDTH / 2:.0f} {y2 - 1:.0f}" '
            f'stroke="{color}" fill="none" marker-end="url(#{name})"/>'
        )
    for folder, (x, y) in at.items():
        files = house.files[folder]
        title = house.package if folder == TOP else _shown(folder)
        lines += [
            f'<rect x="{x:.0f}" y="{y:.0f}" width="{WIDTH}" height="{HEIGHT}" rx="6" '
            'fill="#eef3f8" stroke="#33506e"/>',
            f'<text x="{x + WIDTH / 2:.0f}" y="{y + 17:.0f}" text-anchor="middle" '
            f'font-weight="bold">{escape(title)}</text>',
            f'<text x="{x + WIDTH / 2:.0f}" y="{y + 32:.0f}" text-anchor="middle" '
            f'fill="#55626f">{files} {"file" if files == 1 else "files"}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])


def table(house: House) -> str:
    floors = house.floors()
    lines = [
        f"### {house.package}",
        "",
        f"![The folders of {house.package} and the imports between them](images/house-{house.package}.svg)",
        "",
        f"| folder of `{PACKAGES[house.package]}` | files | holds | imports |",
        "|---|---|---|---|",
    ]
    for folder in sorted(house.files, key=lambda f: (-floors[f], f)):
        shown = "(top)" if folder == TOP else f"`{_shown(folder)}`"
        imports = ", ".join("(top)" if o == TOP else o for o in sorted(house.arrows[folder]))
        cells = (shown, str(house.files[folder]), house.says.get(folder, ""), imports)
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines)


def documents() -> dict[Path, str]:
    """Return the expected text of each file."""
    houses = [read(package, folder) for package, folder in PACKAGES.items()]
    for house in houses:
        for folder, files in house.files.items():
            if files > MOST_FILES:
                sys.exit(
                    f"{house.package}: {folder} has {files} files, more than {MOST_FILES}: divide "
                    "it"
                )
    page = (ROOT / PAGE).read_text()
    head, found, rest = page.partition(BEGIN)
    _, closed, tail = rest.partition(END)
    if not (found and closed):
        sys.exit(f"{PAGE} does not contain the marks {BEGIN} and {END}")
    tables = "\n\n".join(table(house) for house in houses)
    return {
        PAGE: f"{head}{BEGIN}\n\n{tables}\n\n{END}{tail}",
        **{Path(f"docs/images/house-{house.package}.svg"): svg(house) for house in houses},
    }
