"""Entry point for `python -m holdfast.run [options] -- COMMAND`, which is equal to `holdfast run`."""

from __future__ import annotations

import sys

from holdfast.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["run", *sys.argv[1:]]))
