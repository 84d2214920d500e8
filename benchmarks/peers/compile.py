"""`make bench-peers` ends here: DeepSpeed compiles its file writer now and not in somebody's visit.

Needs a C++ compiler and the headers of libaio (Debian: g++, libaio-dev). Without them the writer is
missing from the results, with what the compiler said.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def prepare() -> None:
    """Before deepspeed is imported: a CPU's operators, found and kept beside the environment."""
    environment = Path(sys.prefix)
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["TORCH_EXTENSIONS_DIR"] = str(environment / "extensions")
    os.environ["PATH"] = f"{environment / 'bin'}:{os.environ['PATH']}"


def main() -> None:
    prepare()
    # A compilation that was killed leaves its lock, for which the next one would wait for ever.
    for lock in (Path(sys.prefix) / "extensions").rglob("lock"):
        lock.unlink()
    from deepspeed.ops.op_builder import AsyncIOBuilder

    AsyncIOBuilder().load(verbose=False)


if __name__ == "__main__":
    main()
