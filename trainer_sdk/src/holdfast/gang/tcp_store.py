"""torch's TCPStore for builds of torch without libuv, such as Debian's python3-torch.

Such a build rejects its own default (`use_libuv=True`), and `init_process_group` with a launcher's store
cannot select the other backend. Both backends use the same protocol and the same server.
"""

from __future__ import annotations

import sys
from typing import Any


def open_store(*arguments: Any, **options: Any) -> Any:
    """Open a TCPStore, with torch's default backend first. Raises what torch raises."""
    from torch import distributed as untyped

    distributed: Any = untyped  # torch's stubs do not export its stores
    try:
        return distributed.TCPStore(*arguments, **options)
    except RuntimeError as error:
        if "without libuv" not in str(error):
            raise
    return distributed.TCPStore(*arguments, **{**options, "use_libuv": False})


def tolerate_missing_libuv() -> None:
    """Make `init_process_group("gloo")` (env://) of this process open its store with `open_store`.

    A build with libuv behaves as before. This does nothing in a process that has not imported
    torch.distributed.
    """
    rendezvous: Any = sys.modules.get("torch.distributed.rendezvous")
    if rendezvous is not None and hasattr(rendezvous, "TCPStore"):
        rendezvous.TCPStore = open_store
