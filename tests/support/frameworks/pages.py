"""The scripts of docs/integrations, which the tests run exactly as they stand on their pages."""

from __future__ import annotations

import re
from pathlib import Path

PAGES = Path(__file__).resolve().parents[3] / "docs/integrations"
MOST_LINES = 40


def script_of(page: str) -> str:
    """Return the complete script of a page: its only Python block that opens a Checkpointer and trains."""
    text = (PAGES / page).read_text()
    blocks: list[str] = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    scripts = [block for block in blocks if block.startswith('"""')]
    assert len(scripts) == 1, f"{page}: expected one script with a docstring, found {len(scripts)}"
    lines = scripts[0].splitlines()
    assert len(lines) <= MOST_LINES, (
        f"{page}: the script has {len(lines)} lines, at most {MOST_LINES}"
    )
    return scripts[0]
