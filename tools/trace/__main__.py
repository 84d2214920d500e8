"""Write docs/walks.md: `python -m tools.trace`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.trace.recording import Call
from tools.trace.walks import WALKS, calls_of

PAGE = Path(__file__).resolve().parents[2] / "docs/walks.md"
HEAD = """# Walks through the code

Which files run when Holdfast does one thing, in the order in which each runs first. `make trace` has run the
walks with real processes and has written this page. Order and numbers differ a little from run to run,
because processes run side by side and look at each other from time to time.
"""


def summary(calls: Sequence[Call]) -> str:
    """Return how many files and functions run in a walk."""
    functions = {(call.file, call.function) for call in calls}
    return f"{len({file for file, _ in functions})} files, {len(functions)} functions."


def section(title: str, calls: Sequence[Call]) -> Iterator[str]:
    """Yield the lines of the page about one walk."""
    files: dict[str, list[Call]] = {}
    for call in calls:
        files.setdefault(call.file, []).append(call)
    yield f"## {title}"
    yield ""
    yield summary(calls)
    yield ""
    yield "| file | processes | functions | the first one |"
    yield "|---|---|---|---|"
    for file, here in files.items():
        processes = ", ".join(dict.fromkeys(call.process for call in here))
        functions = {call.function for call in here}
        yield f"| `{file}` | {processes} | {len(functions)} | `{here[0].function}` |"
    yield ""


def main() -> None:
    lines = [HEAD]
    for walk in WALKS:
        print(walk.title, end=" ... ", flush=True)
        calls = calls_of(walk)
        print(summary(calls))
        lines += section(walk.title, calls)
    PAGE.write_text("\n".join(lines).rstrip() + "\n")
    print(PAGE)


main()
