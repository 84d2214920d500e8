"""Entry point of a sidecar with the failpoints of HOLDFAST_FAILPOINTS: `python -m
tests.support.sidecar.failing`.
"""

from __future__ import annotations

import os
import sys

from tests.support.crash.failpoints import install_from_env

from holdfast_sidecar.__main__ import main

if __name__ == "__main__":
    install_from_env(dict(os.environ))
    sys.exit(main())
