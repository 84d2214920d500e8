"""What `checkpoint_id` means for Holdfast: the step, alone or at the end of a path."""

from __future__ import annotations

import os
import re
from pathlib import PurePath

from holdfast_core.errors import ConfigError

CheckpointId = str | os.PathLike[str] | int

_NAME = re.compile(r"\D*(\d+)\Z")


def step_of(checkpoint_id: CheckpointId) -> int:
    """Return the step: the number itself, or the one at the end of a path such as ckpt/step-100.

    Raises ConfigError if the last part of the path has another number, or none.
    """
    if isinstance(checkpoint_id, int):
        return checkpoint_id
    name = PurePath(checkpoint_id).name
    found = _NAME.match(name)
    if found is None:
        raise ConfigError(
            f"checkpoint_id={str(checkpoint_id)!r}: expected the number of optimizer steps, alone (100) or "
            f'as the one number at the end of a path ("ckpt/step-100"), found {name!r}'
        )
    return int(found[1])


def folder_of(checkpoint_id: CheckpointId | None) -> str | None:
    """Return the folder of checkpoints in which a checkpoint_id lies, or None if it names none."""
    if checkpoint_id is None or isinstance(checkpoint_id, int):
        return None
    parent = str(PurePath(checkpoint_id).parent)
    return None if parent == "." and os.sep not in str(checkpoint_id) else parent
