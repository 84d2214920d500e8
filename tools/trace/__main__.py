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


def section(title: str, calls: Sequence[Call]) -> Iterator[str]:
    """Yield the lines of one walk."""
    files: dict[str, dict[str, list[str]]] = {}
    for call in calls:
        names = files.setdefault(call.file, {}).setdefault(call.process, [])
        if call.function not in names:
            names.append(call.function)
    functions = {(call.file, call.function) for call in calls}
    yield f"## {title}"
    yield ""
    yield f"{len(files)} files, {len(functions)} functions."
    yield ""
    yield "| file | processes | functions | the first one |"
    yield "|---|---|---|---|"
    for file, processes in files.items():
        called = {name for names in processes.values() for name in names}
        first = next(iter(processes.values()))[0]
        yield f"| `{file}` | {', '.join(processes)} | {len(called)} | `{first}` |"
    yield ""


def main() -> None:
    lines = [HEAD]
    for walk in WALKS:
        print(walk.title, end=" ... ", flush=True)
        calls = calls_of(walk)
        found = list(section(walk.title, calls))
        print(found[2])
        lines += found
    PAGE.write_text("\n".join(lines).rstrip() + "\n")
    print(PAGE)


main()
