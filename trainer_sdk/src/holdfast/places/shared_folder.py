"""Checks that all nodes of a gang see the same folder, before any of them trusts what it finds there.

A folder on a local disk looks right on every node, but no checkpoint in it would ever be committed, and
every node would restore from its own folder. All ranks call `expect_shared`:
 1. Rank 0 creates a file with a random name and publishes the name in the gang's store.
 2. Every other rank publishes whether it sees that file.
 3. Rank 0 publishes the verdict, and removes the file.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
from pathlib import Path

from holdfast.base.notices import show_notice
from holdfast.base.settings import RankSettings
from holdfast.gang.store import GangStore
from holdfast_core.errors import ConfigError

logger = logging.getLogger(__name__)

_FILE = "shared/file"
_SEEN = "shared/seen"
_VERDICT = "shared/verdict"


def expect_shared(root: Path, settings: RankSettings, store: GangStore | None) -> None:
    """Return if all ranks see the folder `root` of rank 0. The gang's ranks must all call it.

    A gang on one node is not checked, and neither is a folder that rank 0 cannot write.

    Raises ConfigError on every rank if a rank does not see it.
    """
    if store is None or settings.local_world_size >= settings.world_size:
        return
    if settings.rank == 0:
        _lead(root, settings, store)
    else:
        name = json.loads(store.wait(_FILE))
        seen = name is None or (root / name).exists()
        host = None if seen else socket.gethostname()
        store.publish(f"{_SEEN}/{settings.rank}", json.dumps(host))
    error = json.loads(store.wait(_VERDICT))
    if error is not None:
        raise ConfigError(error)


def _lead(root: Path, settings: RankSettings, store: GangStore) -> None:
    name = f".shared-{secrets.token_hex(8)}"
    try:
        os.close(os.open(root / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o640))
    except OSError as error:
        logger.warning("%s: cannot check that all nodes share this folder: %s", root, error)
        store.publish(_FILE, json.dumps(None))
        store.publish(_VERDICT, json.dumps(None))
        return
    try:
        store.publish(_FILE, json.dumps(name))
        hosts = {
            rank: json.loads(store.wait(f"{_SEEN}/{rank}"))
            for rank in range(1, settings.world_size)
        }
    finally:
        (root / name).unlink(missing_ok=True)
    blind = [f"rank {rank} on {host}" for rank, host in hosts.items() if host is not None]
    if not blind:
        show_notice(
            logger,
            "%s is the same folder on all %d nodes",
            root,
            -(-settings.world_size // settings.local_world_size),
        )
        store.publish(_VERDICT, json.dumps(None))
        return
    more = f" and {len(blind) - 4} more" if len(blind) > 4 else ""
    store.publish(
        _VERDICT,
        json.dumps(
            f"{root} is not the same folder on all nodes: rank 0 on {socket.gethostname()} created a file "
            f"in it, which {', '.join(blind[:4])}{more} cannot see. Put the folder on a file system that "
            "all nodes mount at this path, such as NFS or Lustre"
        ),
    )
