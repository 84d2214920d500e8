"""One run trains in a folder; others may restore from it.

The order, in every rank, before the first save:
 1. rank 0: takes DIR/training.lock (see directory.claims), which ends with its process, and writes to the
    gang's store whether it has it.
 2. others: read that.
 3. all: go on, or raise the same error.
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
    """Once for each Checkpointer. Raises ConfigError where another run trains in the folder, and where the
    folder cannot be written."""
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
    """At opening: who opens the folder learns at once that it cannot train there."""
    holder = place.trained_by()
    if holder is not None:
        logger.warning(
            "%s is in use: %s trains in it. This process may restore from it, and cannot save into it "
            "before that one has ended",
            place.root,
            holder,
        )
