"""The last step of `make bench-peers`: compiles DeepSpeed's file writer before any visit needs it.

Needs a C++ compiler and the headers of libaio (Debian: g++, libaio-dev). Without them the results contain
the compiler's message instead of figures for the writer.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def prepare() -> None:
    """Select DeepSpeed's CPU operators and a folder for them. Must run before deepspeed is imported."""
    environment = Path(sys.prefix)
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["TORCH_EXTENSIONS_DIR"] = str(environment / "extensions")
    os.environ["PATH"] = f"{environment / 'bin'}:{os.environ['PATH']}"


def main() -> None:
    prepare()
    # A compilation that was killed leaves its lock file, and the next one would wait for it for ever.
    for lock in (Path(sys.prefix) / "extensions").rglob("lock"):
        lock.unlink()
    from deepspeed.ops.op_builder import AsyncIOBuilder

    AsyncIOBuilder().load(verbose=False)


if __name__ == "__main__":
    main()
