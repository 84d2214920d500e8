"""`save`, `async_save` and `load` with the signatures of torch.distributed.checkpoint.

Without `storage_writer` and `storage_reader` they use one Checkpointer of the process: in a worker pod that
of the pod, elsewhere that of the folder in `checkpoint_id`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from holdfast.api import SharedCheckpointer
from holdfast.base.handle import SaveHandle
from holdfast.checkpointer import Checkpointer
from holdfast.integrations.dcp.storage import (
    PROCESS_REFUSED,
    CheckpointId,
    StorageReader,
    StorageWriter,
    folder_of,
)
from holdfast.integrations.futures import WAIT_SECONDS, future_of
from holdfast.state.tree import is_stateful
from holdfast_core.contract import PodContract
from holdfast_core.errors import ConfigError, HoldfastError

_shared = SharedCheckpointer(
    "dcp.save and load",
    "pass storage_writer=StorageWriter(holdfast.Checkpointer(...), step)",
    interval_steps=0,
    when_busy="wait",
    on_save_error="raise",
)


def save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: CheckpointId | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> SaveHandle:
    """Save a state and wait until the step is durable. Every rank must call it.

    checkpoint_id: the step, alone or at the end of a path ("ckpt/step-100").
    storage_writer: a `StorageWriter`. Without it the folder in `checkpoint_id` is used.
    planner: a planner derived from DefaultSavePlanner. It chooses names and values; copies are left to
      Holdfast.
    process_group: must contain all ranks, because all of them save.
    no_dist, use_collectives: have no effect, because there is no collective.

    Returns the handle of the save, in place of DCP's Metadata, which describes files. Raises SaveFailedError
    if the step does not become durable, UnsupportedStateError for a value that cannot be saved, and
    ConfigError for an argument that Holdfast cannot honour.
    """
    handle = _save(state_dict, checkpoint_id, storage_writer, planner, process_group)
    handle.wait("local", WAIT_SECONDS)
    return handle


def async_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: CheckpointId | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    async_checkpointer_type: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
    async_stager: AsyncStager | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Future[SaveHandle]:
    """Copy a state and return a Future that ends when the step is durable. Every rank must call it.

    The copy is made when this returns: training may change the state. Arguments and errors are those of
    `save`. The Future raises why the step did not become durable. With on_save_error="raise" an error of the
    copy is raised here. The process group needs no backend for CPU tensors.

    async_checkpointer_type: PROCESS is refused, because Holdfast writes in a process of its own.
    async_stager: is refused, because Holdfast stages the state itself.
    """
    if async_checkpointer_type is not AsyncCheckpointerType.THREAD:
        raise ConfigError(f"async_save: {PROCESS_REFUSED}")
    if async_stager is not None and async_stager is not storage_writer:
        raise ConfigError(
            f"async_save: async_stager={type(async_stager).__qualname__} has no use: leave it out. "
            "Holdfast copies the state into shared memory itself"
        )
    handle = _save(state_dict, checkpoint_id, storage_writer, planner, process_group)
    return future_of(handle)


def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: CheckpointId | None = None,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> None:
    """Load a checkpoint into a state, in place, on any number of ranks. Every rank must call it.

    Keys that the state does not have are not read. Values are cast to the dtypes of the state. The load
    makes this step the restore point: steps that are saved afterwards replace the later ones of the folder.

    checkpoint_id: the step, alone or at the end of a path. Without it the newest step is loaded, or in a pod
      the restore point of this round.
    storage_reader: a `StorageReader`. Without it the folder in `checkpoint_id` is used.
    planner: any planner of DCP.

    Raises torch's CheckpointException for a key that is missing or has another shape, as DCP does, and
    HoldfastError for a checkpoint that cannot be read.
    """
    _require_all_ranks(process_group)
    reader = storage_reader
    if reader is None:
        reader = StorageReader(_checkpointer(checkpoint_id))
    elif not isinstance(reader, StorageReader):
        raise ConfigError(
            f"load: storage_reader is a {type(reader).__qualname__}, expected a StorageReader of "
            "holdfast.integrations.dcp: use torch.distributed.checkpoint.load for other readers"
        )
    reader.reset(checkpoint_id)
    reader.look()  # its errors would reach the caller as a torch AssertionError
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            state_dict_loader.load(
                state_dict,
                checkpoint_id=checkpoint_id,
                storage_reader=reader,
                planner=planner,
                no_dist=True,
            )
    except CheckpointException as error:
        for cause, _ in error.failures.values():
            if isinstance(cause, HoldfastError):
                raise cause from None
        raise


def _save(
    state_dict: Mapping[str, Any],
    checkpoint_id: CheckpointId | None,
    writer: StorageWriter | None,
    planner: SavePlanner | None,
    process_group: dist.ProcessGroup | None,
) -> SaveHandle:
    _require_all_ranks(process_group)
    if writer is None:
        writer = StorageWriter(_checkpointer(checkpoint_id))
    elif not isinstance(writer, StorageWriter):
        raise ConfigError(
            f"save: storage_writer is a {type(writer).__qualname__}, expected a StorageWriter of "
            "holdfast.integrations.dcp: use torch.distributed.checkpoint.save for other writers"
        )
    writer.reset(checkpoint_id)
    plain = {key: one.state_dict() if is_stateful(one) else one for key, one in state_dict.items()}
    planner = DefaultSavePlanner() if planner is None else planner
    planner.set_up_planner(plain, None, True)
    return writer.save(writer.prepare_local_plan(planner.create_local_plan()), planner)


def _require_all_ranks(group: dist.ProcessGroup | None) -> None:
    if group is not None and dist.get_world_size(group) != dist.get_world_size():
        raise ConfigError(
            f"process_group has {dist.get_world_size(group)} of {dist.get_world_size()} ranks: every rank "
            "must save and load with Holdfast, which writes copies once by itself: leave it out"
        )


def _checkpointer(checkpoint_id: CheckpointId | None) -> Checkpointer:
    """Return the Checkpointer of this process.

    Raises ConfigError outside of a pod if no folder is known, and for another folder than before.
    """
    return _shared.of(None if PodContract.from_env() is not None else folder_of(checkpoint_id))
