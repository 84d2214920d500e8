"""Clients of the other sidecars of the gang."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_sidecar.wire.bulk import BulkPeers
from holdfast_sidecar.wire.client import Peers


@dataclass(frozen=True, slots=True)
class Members:
    """The two ways to reach a member: messages to its control port, and bytes to its bulk port."""

    control: Peers
    bulk: BulkPeers
