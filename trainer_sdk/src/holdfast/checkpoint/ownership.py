"""Lets only one run train in a folder. Other runs may restore from it.

Every rank does this before its first save:
 1. Rank 0 acquires DIR/training.lock (see directory.claims), which it holds until its process ends at the
    latest. It writes to the gang's store whether it holds the lock.
 2. The other ranks read that value.
 3. All ranks continue, or all raise the same error.
"""

from __future__ import annotations

import json
import logging

from holdfast.checkpoint.places import DirectoryPlace
from holdfast.gang.store import GangStore
from holdfast_core.errors import ConfigError
from holdfast_core.ids import Rank

logger = logging.getLogger(__name__)

_KEY = "training"


def take_for_training(place: DirectoryPlace, store: GangStore | None, rank: Rank) -> None:
    """Acquire the folder's training lock for all ranks. Call it once for each Checkpointer.

    Raises ConfigError where another run trains in the folder, and where the folder cannot be written.
    """
    if rank != 0 and store is not None:
        error = json.loads(store.wait(_KEY))
        if error is not None:
            raise ConfigError(error)
        return
    try:
        place.take_for_training()
    except ConfigError as refused:
        if store is not None:
            store.publish(_KEY, json.dumps(str(refused)))
        raise
    if store is not None:
        store.publish(_KEY, json.dumps(None))


def report_other_training(place: DirectoryPlace) -> None:
    """Warn, when the folder is opened, that another run trains in it and that saves will fail."""
    holder = place.trained_by()
    if holder is not None:
        logger.warning(
            "%s is in use: %s trains in it. This process may restore from it, and cannot save into it "
            "before that one has ended",
            place.root,
            holder,
        )
