"""The path and the reply of each message, in one table for client and server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from holdfast_core.messages.relay import Relay, RelayReply
from holdfast_core.messages.schema import (
    Buffered,
    BufferedReply,
    BufferNotice,
    CopyReply,
    CopyRequest,
    FinishCommit,
    GangRequest,
    Inventory,
    KeepLayout,
    LevelNotice,
    ManifestPut,
    Ok,
    PersistRequest,
    Prepared,
    PreparedReply,
    Prune,
    PruneReply,
    Replicated,
    Round,
    Seal,
    Suspect,
    Uploaded,
    WorkerReport,
)

SAVE_NOW = "/v1/save-now"
STOP = "/v1/stop"
END = "/v1/end"


ROUND_HEADER = "Holdfast-Round"
"""Header with the round of the message in the body. A message of another round is refused unread."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A path with the types of its message and reply."""

    path: str
    request: type[Any]
    reply: type[Any]


POSTS: tuple[Endpoint, ...] = (
    Endpoint("/v1/seal", Seal, Inventory),
    Endpoint("/v1/round", Round, Inventory),
    Endpoint("/v1/finish-commit", FinishCommit, Inventory),
    Endpoint(SAVE_NOW, GangRequest, Ok),
    Endpoint(STOP, GangRequest, Ok),
    Endpoint(END, GangRequest, Ok),
    Endpoint("/v1/prepared", Prepared, PreparedReply),
    Endpoint("/v1/buffered", Buffered, BufferedReply),
    Endpoint("/v1/copy", CopyRequest, CopyReply),
    Endpoint("/v1/replicated", Replicated, Ok),
    Endpoint("/v1/uploaded", Uploaded, Ok),
    Endpoint("/v1/report", WorkerReport, Ok),
    Endpoint("/v1/manifest", ManifestPut, Ok),
    Endpoint("/v1/layout", KeepLayout, Ok),
    Endpoint("/v1/level", LevelNotice, Ok),
    Endpoint("/v1/buffer-notice", BufferNotice, Ok),
    Endpoint("/v1/persist", PersistRequest, Ok),
    Endpoint("/v1/suspect", Suspect, Ok),
    Endpoint("/v1/prune", Prune, PruneReply),
    Endpoint("/v1/relay", Relay, RelayReply),
)

BY_PATH = {e.path: e for e in POSTS}

PATHS: dict[type[Any], str] = {e.request: e.path for e in POSTS if e.request is not GangRequest}
