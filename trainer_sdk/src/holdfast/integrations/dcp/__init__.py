"""torch.distributed.checkpoint over Holdfast: `save`, `async_save` and `load` with DCP's signatures.

    from holdfast.integrations import dcp  # instead of: import torch.distributed.checkpoint as dcp

Every rank calls them. They need no process group, and no save makes a collective.
"""

from __future__ import annotations

from holdfast.integrations.dcp.functions import async_save, load, save
from holdfast.integrations.dcp.storage import StorageReader, StorageWriter

__all__ = ["StorageReader", "StorageWriter", "async_save", "load", "save"]
