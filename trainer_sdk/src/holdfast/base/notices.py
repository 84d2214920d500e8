"""What a person has to know of a run, also where a script never configured logging.

Python shows nothing below WARNING then, and a warning would be wrong: nothing is. So these lines go to
standard error where the script's own configuration would lose them.
"""

from __future__ import annotations

import logging
import sys

_PARENT = "holdfast"


def say(logger: logging.Logger, message: str, *args: object) -> None:
    """Log at INFO; write the line to standard error where INFO is not shown.

    `logging.getLogger("holdfast").setLevel(logging.WARNING)` turns these lines off. Call it on rank 0
    only, once for each event.
    """
    is_shown = logger.hasHandlers() and logger.isEnabledFor(logging.INFO)
    if is_shown or logging.getLogger(_PARENT).level != logging.NOTSET:
        logger.info(message, *args)
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("[holdfast] %(message)s"))
    handler.handle(logger.makeRecord(logger.name, logging.INFO, "", 0, message, args, None))
