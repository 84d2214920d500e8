"""Check of the node volume before the first step.

A volume that is too small does not show before the first save, or before the first that is kept beside
others. Then saves fail, or wait until an older checkpoint has been pruned.
"""

from __future__ import annotations

from holdfast_core.errors import CapacityError
from holdfast_core.messages.schema import Policy

_ADVICE = "raise the size of spec.checkpoint.node.volume"


def node_room_warning(payload_bytes: int, policy: Policy, room_bytes: int) -> str:
    """Return what a rank's share of the node volume is too small for. An empty text: it suffices.

    Args:
        payload_bytes: Bytes of one save of the rank.
        policy: Number of checkpoints that are kept, and of copies on other nodes.
        room_bytes: The rank's share, which also holds the copies that its pod keeps for others.

    Raises:
        CapacityError: The share is smaller than one save, so no save can succeed.
    """
    if payload_bytes > room_bytes:
        raise CapacityError(
            f"the node volume has {room_bytes} bytes for each rank of the pod (85 % of the volume), and one "
            f"save of this rank needs {payload_bytes}: {_ADVICE}"
        )
    checkpoints, shards = policy.keep_last + 1, 1 + policy.peer_copies
    needed = payload_bytes * checkpoints * shards
    if needed <= room_bytes:
        return ""
    return (
        f"the node volume has {room_bytes} bytes for each rank of the pod (85 % of the volume), and "
        f"{needed} are needed: {payload_bytes} bytes in {shards} shards (its own and {policy.peer_copies} "
        f"copies for peers) of {checkpoints} checkpoints (keepLast {policy.keep_last}, and one that is being "
        "saved). Until then, fewer checkpoints are kept, and a save may wait for room: "
        f"{_ADVICE}, or lower spec.checkpoint.retention.keepLast"
    )
