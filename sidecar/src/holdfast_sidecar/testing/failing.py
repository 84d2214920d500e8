"""The sidecar with failpoints, as HOLDFAST_FAILPOINTS says: `python -m holdfast_sidecar.testing.failing`."""

from __future__ import annotations

import sys

from holdfast_core.testing.failpoints import install_from_env
from holdfast_sidecar.__main__ import main
from holdfast_sidecar.settings import inherited

if __name__ == "__main__":
    install_from_env(inherited())
    sys.exit(main())
