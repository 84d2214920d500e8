"""Count the code that ships, and compare it with a limit for each package.

`python -m tools.code_size` prints the lines of each package. `--check` fails if a package is above its limit
in `LIMITS`. An engineer who needs more raises the limit in the same commit, so that growth is a decision that
a review sees (ADR 0027).

A line of code is a line with a token that is neither a comment nor a docstring.
"""

from __future__ import annotations

import argparse
import ast
import io
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMITS = {
    "core": 18798,  # 280 are stores of Google, 90 serve restores of pods and folders alike
    # 160 of them keep what nothing proves to be lost or owned: the data of other clusters, and pods while the
    # store lacks a checkpoint. They also say what a quota or a missing store holds up.
    # 13 let a prune that fails for ever give its turn to others, and 12 say what a delete waits for.
    "operator": 14425,
    "sidecar": 8532,  # 11 make a request for the plan wait until its coordinator has begun the round
    # 240 of them are the suite that stores of others must pass (holdfast.testing), and 70 begin a round after
    # a restore that failed, so that the script can go on.
    "trainer_sdk": 18053,
    "cli": 5362,
}
"""Most lines of code of each package."""

_NO_CODE = frozenset(
    {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENCODING,
        tokenize.ENDMARKER,
    }
)


@dataclass(frozen=True, slots=True)
class Size:
    """Size of one package."""

    package: str
    files: int
    lines: int

    @property
    def limit(self) -> int:
        return LIMITS[self.package]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tools.code_size")
    parser.add_argument("--check", action="store_true", help="fail above a limit")
    options = parser.parse_args(arguments)
    found = [size_of(package) for package in LIMITS]
    if not options.check:
        print(table(found))
        return 0
    problems = list(above(found))
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def size_of(package: str) -> Size:
    files = sorted((ROOT / package / "src").rglob("*.py"))
    return Size(package, len(files), sum(code_lines(file.read_text()) for file in files))


def code_lines(source: str) -> int:
    """Return the number of lines of Python that are neither empty, comments nor docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - set(_docstrings(ast.parse(source))))


def _docstrings(tree: ast.AST) -> Iterator[int]:
    """Yield the lines of all strings that are statements: docstrings, and those below fields."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
            continue
        if isinstance(node.value.value, str) and node.end_lineno is not None:
            yield from range(node.lineno, node.end_lineno + 1)


def above(sizes: Iterable[Size]) -> Iterator[str]:
    """Yield an error for each package above its limit."""
    for size in sizes:
        if size.lines > size.limit:
            yield (
                f"{size.package} has {size.lines:,} lines of code, and its limit is {size.limit:,}. Remove "
                f"what the change made unnecessary, or raise the limit in {Path(__file__).name} in the same "
                "commit and say there what the lines are for"
            )


def table(sizes: list[Size]) -> str:
    rows = ["| package | files | lines of code | limit |", "|---|---|---|---|"]
    rows += [f"| {s.package} | {s.files} | {s.lines:,} | {s.limit:,} |" for s in sizes]
    files, lines = sum(s.files for s in sizes), sum(s.lines for s in sizes)
    return "\n".join([*rows, f"| all | {files} | {lines:,} | |"])


if __name__ == "__main__":
    sys.exit(main())
