"""The path and the reply of each message, in one table for client and server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from holdfast_core.messages.schema import (
    CopyReply,
    CopyRequest,
    FinishCommit,
    GangRequest,
    Inventory,
    Ok,
    Prune,
    Round,
    Seal,
    ShardRef,
    WorkerReports,
)

SAVE_NOW = "/v1/save-now"
STOP = "/v1/stop"
END = "/v1/end"


ROUND_HEADER = "Holdfast-Round"
"""Header with the round of the message in the body. A message of another round is refused unread."""


@dataclass(frozen=True, slots=True)
class Route:
    """A path with the types of its message and reply."""

    path: str
    request: type[Any]
    reply: type[Any]


POSTS: tuple[Route, ...] = (
    Route("/v1/seal", Seal, Inventory),
    Route("/v1/round", Round, Inventory),
    Route("/v1/finish-commit", FinishCommit, Inventory),
    Route(SAVE_NOW, GangRequest, Ok),
    Route(STOP, GangRequest, Ok),
    Route(END, GangRequest, Ok),
    Route("/v1/copy", CopyRequest, CopyReply),
    Route("/v1/report", WorkerReports, Ok),
    Route("/v1/suspect", ShardRef, Ok),
    Route("/v1/prune", Prune, Ok),
)

PATHS: dict[type[Any], str] = {e.request: e.path for e in POSTS if e.request is not GangRequest}
