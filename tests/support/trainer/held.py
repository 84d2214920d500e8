"""Run a training script that does not do more optimizer steps than the test has allowed.

    python held.py LIMIT SCRIPT [ARGUMENT ...]

The file LIMIT contains the number of steps. The script waits before the next one, until the test has written
a higher number or removed the file. Without the wait, a training could end before a test has killed it, on a
machine where the test runs late or where checkpoints become durable late.
"""

from __future__ import annotations

import contextlib
import runpy
import sys
import time
from pathlib import Path
from typing import Any

_POLL_SECONDS = 0.01


def held(limit: Path, script: Path) -> list[str]:
    """Return the start of the command that runs `script` with this file for its limit."""
    return [sys.executable, str(Path(__file__)), str(limit), str(script)]


def allow(limit: Path, steps: int | None) -> None:
    """Let the training do this number of steps, counted from its beginning. None: all."""
    if steps is None:
        limit.unlink()
        return
    new = limit.with_suffix(".new")
    new.write_text(str(steps))
    new.replace(limit)


def _allowed(limit: Path) -> float:
    with contextlib.suppress(FileNotFoundError):
        return int(limit.read_text())
    return float("inf")


def main(limit: Path, script: str, *arguments: str) -> None:
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    def wait(optimizer: Any, *_: object) -> None:
        # AdamW counts the steps in its state, which is restored.
        done = max((int(state["step"]) for state in optimizer.state.values()), default=0)
        while done >= _allowed(limit):
            time.sleep(_POLL_SECONDS)

    register_optimizer_step_pre_hook(wait)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
