"""`make fuzz MINUTES=10`: run the targets of the tests with new seeds until the time is over.

An input that breaks a target is kept in tests/fuzz/cases, where every later run of the tests tries it.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
import time
import traceback
from pathlib import Path

from tests.fuzz.search import BrokenTargetError, search
from tests.fuzz.targets import TARGETS

CASES = Path(__file__).parent / "cases"
EXAMPLES = 300


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--only", default="", help="targets whose name contains this")
    options = parser.parse_args()
    names = [name for name in TARGETS if options.only in name]
    if not names:
        print(f"no target contains {options.only!r}; there are: {', '.join(TARGETS)}")
        return 2
    end = time.monotonic() + 60 * options.minutes
    broken: set[str] = set()
    inputs = rounds = 0
    while time.monotonic() < end and len(broken) < len(names):
        rounds += 1
        for name in random.sample(names, len(names)):
            if time.monotonic() >= end:
                break
            if name in broken:
                continue
            seed = random.randrange(1 << 48)
            try:
                search(TARGETS[name], seed=seed, examples=EXAMPLES)
                inputs += EXAMPLES
            except BrokenTargetError as error:
                broken.add(name)
                _keep(name, seed, error)
    print(f"{rounds} rounds over {len(names)} targets, {inputs} inputs, {len(broken)} broken")
    return 1 if broken else 0


def _keep(name: str, seed: int, error: BrokenTargetError) -> None:
    path = CASES / name / hashlib.sha256(error.data).hexdigest()[:16]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(error.data)
    traceback.print_exception(error.__cause__)
    print(f"target {name}, seed {seed}: the input is kept in {path}")
    print(f"again: pytest tests/fuzz -k '{name}-{path.name}'")


if __name__ == "__main__":
    sys.exit(main())
