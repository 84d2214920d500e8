"""Steps with stamps. A hash of a step's inputs records that it is done, so that `up` resumes anywhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from testbed.config import Bed, digest
from testbed.shell import BedError


@dataclass(frozen=True, slots=True)
class Step:
    """One piece of work.

    A step counts as done if its stamp has the hash of `inputs`, all `outputs` exist, and `present`, if
    given, returns True (for a result that is not a file, such as an image). `action` gets its log file and
    returns a note to print, or None. A step with `always` has no stamp and runs each time; it checks the
    live state itself (engine, cluster) and is quick if nothing is to be done.
    """

    name: str
    action: Callable[[Path], str | None]
    inputs: Sequence[str | bytes | Path] = ()
    outputs: Sequence[Path] = ()
    present: Callable[[], bool] | None = None
    always: bool = False
    advice: str = ""


def is_done(step: Step, stamps: Path) -> bool:
    if step.always:
        return False
    stamp = stamps / step.name
    if not stamp.is_file() or stamp.read_text() != digest(*step.inputs):
        return False
    if not all(path.exists() for path in step.outputs):
        return False
    return step.present is None or step.present()


def run_steps(steps: Sequence[Step], bed: Bed) -> None:
    """Run the steps that are not done, in order.

    Raises BedError that names the failed step, its log and what the user can try.
    """
    bed.prepare()
    for number, step in enumerate(steps, 1):
        label = f"[{number}/{len(steps)}] {step.name}"
        if is_done(step, bed.stamps):
            print(f"{label}: done before", flush=True)
            continue
        print(f"{label} ...", end=" ", flush=True)
        started = time.monotonic()
        log = bed.logs / f"{step.name.replace(' ', '-').replace('/', '-')}.log"
        log.write_text("")
        if not step.always:
            (bed.stamps / step.name).unlink(missing_ok=True)
        try:
            note = step.action(log)
        except (BedError, OSError) as error:
            print("FAILED", flush=True)
            raise failure(step, log, error) from error
        if not step.always:
            (bed.stamps / step.name).write_text(digest(*step.inputs))
        print(f"{time.monotonic() - started:.0f} s{f' ({note})' if note else ''}", flush=True)


def failure(step: Step, log: Path, error: Exception) -> BedError:
    text = log.read_text(errors="replace") if log.is_file() else ""
    tail = "\n".join(f"    {line[:300]}" for line in text.splitlines()[-12:])
    advice = (error.advice if isinstance(error, BedError) else "") or step.advice
    parts = [f"step '{step.name}' failed: {error}", f"  log: {log}"]
    if tail:
        parts.append(f"  the log ends with:\n{tail}")
    return BedError(
        "\n".join(parts), advice or "run the same command again: finished steps are kept"
    )


def report_error(program: str, error: BedError) -> int:
    """Print the error and its advice to stderr. Returns the exit status."""
    print(f"{program}: {error}", file=sys.stderr)
    if error.advice:
        print(f"try: {error.advice}", file=sys.stderr)
    return 1


def warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)
