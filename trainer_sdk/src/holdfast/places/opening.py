"""Chooses the place of a Checkpointer: the folder that the script names, or this worker pod."""

from __future__ import annotations

from holdfast.base.options import Options
from holdfast.base.settings import RankSettings
from holdfast.places.folder import FolderPlace
from holdfast.places.place import Place
from holdfast.places.pod import PodPlace
from holdfast_core.contract import PodContract
from holdfast_core.errors import ConfigError


def place_for(options: Options, settings: RankSettings) -> Place:
    """Return the place of these options. Raises ConfigError where there is none."""
    if options.folder is not None:
        return FolderPlace(options.folder, options, settings)
    contract = PodContract.from_env()
    if contract is not None:
        return PodPlace(contract, settings)
    raise ConfigError(
        "Checkpointer: this process is not in a worker pod of a TrainingJob (HOLDFAST_JOB_UID is "
        'not set), so set the folder of the checkpoints: holdfast.Checkpointer(dir="ckpt")'
    )
