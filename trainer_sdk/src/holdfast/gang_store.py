"""The gang's TCPStore, as a client: the few keys by which ranks agree on something.

Needs torch only where there is more than one rank.
"""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import Any, Protocol

from holdfast.settings import RankSettings
from holdfast.tcp_store import open_store
from holdfast_core.errors import ConfigError

_TIMEOUT = timedelta(minutes=30)
"""Ranks of a large job start minutes apart; a rank that never comes is the launcher's to notice."""

_instances = itertools.count()


class GangStore(Protocol):
    """What is used of torch.distributed.Store."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def add(self, key: str, amount: int, /) -> int: ...

    def check(self, keys: list[str], /) -> bool: ...


def connect_store(settings: RankSettings) -> GangStore | None:
    """None for a gang of one. Keys are under a prefix of this round and this Checkpointer.

    Raises ConfigError when there is no store to connect to.
    """
    if settings.world_size == 1:
        return None
    from torch import distributed as untyped

    distributed: Any = untyped  # torch's stubs do not export its stores

    instance = next(_instances)
    prefix = f"holdfast/{settings.round or 0}/{instance}"
    if settings.agent_store:
        store = open_store(
            settings.master_address,
            settings.master_port,
            is_master=False,
            timeout=_TIMEOUT,
            use_libuv=False,
        )
    elif distributed.is_initialized():
        store = distributed.distributed_c10d._get_default_store()
    else:
        raise ConfigError(
            f"{settings.world_size} ranks, but no store to agree by: start them by `holdfast run` or "
            "torchrun, or call torch.distributed.init_process_group before the Checkpointer"
        )
    wrapped: GangStore = distributed.PrefixStore(prefix, store)
    return wrapped
