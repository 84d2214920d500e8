"""Notices for the user that appear even if the script never configured logging.

Without configuration Python shows only messages of level WARNING and above, and these notices are not
warnings. They go to standard error where the script's configuration would drop them.
"""

from __future__ import annotations

import logging
import sys

_PARENT = "holdfast"


def show_notice(logger: logging.Logger, message: str, *args: object) -> None:
    """Log at INFO, or write the line to standard error where INFO is not shown.

    A script turns these lines off with `logging.getLogger("holdfast").setLevel(logging.WARNING)`. Call
    this on rank 0 only, once for each event.
    """
    is_shown = logger.hasHandlers() and logger.isEnabledFor(logging.INFO)
    if is_shown or logging.getLogger(_PARENT).level != logging.NOTSET:
        logger.info(message, *args)
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("[holdfast] %(message)s"))
    handler.handle(logger.makeRecord(logger.name, logging.INFO, "", 0, message, args, None))
