"""torch's TCPStore, also where torch was built without libuv (Debian's python3-torch).

Such a build refuses its own default (`use_libuv=True`), and `init_process_group` with a launcher's store
gives no way to ask for the other backend. Both speak the same protocol to the same server.
"""

from __future__ import annotations

import sys
from typing import Any


def open_store(*arguments: Any, **options: Any) -> Any:
    """A TCPStore; tried with torch's default backend first. Raises what torch raises."""
    from torch import distributed as untyped

    distributed: Any = untyped  # torch's stubs do not export its stores
    try:
        return distributed.TCPStore(*arguments, **options)
    except RuntimeError as error:
        if "without libuv" not in str(error):
            raise
    return distributed.TCPStore(*arguments, **{**options, "use_libuv": False})


def tolerate_missing_libuv() -> None:
    """Let `init_process_group("gloo")` (env://) of this process open its store by `open_store`.

    Where libuv is there, nothing changes. Does nothing in a process that has not imported torch.
    """
    rendezvous: Any = sys.modules.get("torch.distributed.rendezvous")
    if rendezvous is not None and hasattr(rendezvous, "TCPStore"):
        rendezvous.TCPStore = open_store
