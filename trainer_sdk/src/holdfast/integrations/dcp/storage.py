"""A StorageWriter that is its own AsyncStager, and a StorageReader, for the functions of DCP itself.

torch.distributed.checkpoint plans each save with collectives, because it has to decide which rank writes a
copy and which file holds which part. Holdfast needs neither: each rank hands over its own parts, and the
persisters write each copy once. So these classes take the plan of each rank before DCP removes copies from
it, and answer a load with metadata in which each tensor is one chunk.

A `checkpoint_id` is the step for Holdfast, alone or at the end of a path.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageReader as _Reader
from torch.distributed.checkpoint.storage import StorageWriter as _Writer
from torch.distributed.checkpoint.storage import WriteResult

from holdfast.base.handle import RestorePoint, SaveHandle, TensorInfo
from holdfast.checkpointer import Checkpointer
from holdfast.integrations.dcp.contents import OBJECTS, Reads, state_to_save
from holdfast.integrations.futures import WAIT_SECONDS
from holdfast.integrations.versions import warn_if_untested
from holdfast_core.errors import ConfigError, CorruptionError, NotFoundError

CheckpointId = str | os.PathLike[str] | int

_NAME = re.compile(r"\D*(\d+)\Z")


PROCESS_REFUSED = (
    "AsyncCheckpointerType.PROCESS would send the Checkpointer to another process, where it cannot work: "
    "leave async_checkpointer_type out. Holdfast writes in a process of its own anyway"
)


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


class StorageWriter(_Writer, AsyncStager):
    """Writes one checkpoint. Pass it as `storage_writer`, a new one for each save.

    With torch's own `async_save` also pass `no_dist=True`, so that there is no collective.

    checkpointer: an open Checkpointer. Use when_busy="wait", so that no rank leaves a save out.
    step: number of optimizer steps done. It may be left out if `checkpoint_id` has it, except for torch's
      own `async_save`, which stages before it passes the checkpoint_id.
    """

    def __init__(self, checkpointer: Checkpointer, step: int | None = None) -> None:
        warn_if_untested("torch")
        self._checkpointer = checkpointer
        self._step = step
        self._plan: SavePlan | None = None
        self._is_staged = False
        self.handle: SaveHandle | None = None
        """The save, once its copy has been made."""

    def save(self, plan: SavePlan, planner: SavePlanner) -> SaveHandle:
        """Copy what the local plan names. Training may then change the state."""
        if self._step is None:
            raise ConfigError(
                "StorageWriter: pass the number of optimizer steps, StorageWriter(checkpointer, step), "
                'or a checkpoint_id that ends with it, such as "ckpt/step-100"'
            )
        self.handle = self._checkpointer.save(self._step, state_to_save(plan, planner))
        return self.handle

    # ------------------------------------------------------------------ torch's StorageWriter

    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        if checkpoint_id is None:
            return
        step = step_of(checkpoint_id)
        if self._step not in (None, step):
            raise ConfigError(
                f"StorageWriter: it is for step {self._step}, and checkpoint_id={checkpoint_id!r} names "
                f"step {step}: make a StorageWriter for each save"
            )
        self._step = step

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if not plan.usable:
            raise ConfigError(
                "StorageWriter: the planner has replaced its plan by that of an earlier save: leave "
                "enable_plan_caching out"
            )
        self._plan = plan
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(
        self, plan: SavePlan, planner: SavePlanner
    ) -> torch.futures.Future[list[WriteResult]]:
        if self._is_staged:
            self._require_default(planner)
        elif threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                "StorageWriter: a Checkpointer copies the state in the main thread: leave async_stager "
                "out, because the StorageWriter is the stager"
            )
        if self.handle is None and self._plan is not None:
            self.save(self._plan, planner)
        if self.handle is not None:
            self.handle.wait("local", WAIT_SECONDS)
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        pass  # Holdfast has committed the step

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        try:
            step_of(checkpoint_id)
        except ConfigError:
            return False
        return True

    # ------------------------------------------------------------------ torch's AsyncStager

    @property
    def should_synchronize_after_execute(self) -> bool:
        return False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        planner = DefaultSavePlanner()
        planner.set_up_planner(state_dict, None, True)
        self._is_staged = True
        self.save(planner.create_local_plan(), planner)
        return {}

    def synchronize_staging(self) -> None:
        pass  # the copy is complete, or the device makes it before later work

    def close(self) -> None:
        pass

    def __reduce__(self) -> NoReturn:
        raise ConfigError(f"StorageWriter cannot be pickled. {PROCESS_REFUSED}")

    def _require_default(self, planner: SavePlanner) -> None:
        if type(planner) is not DefaultSavePlanner:
            raise ConfigError(
                f"StorageWriter: torch's async_save has staged step {self._step} without the planner "
                f"{type(planner).__qualname__}: use holdfast.integrations.dcp.async_save, which uses it"
            )


class StorageReader(_Reader):
    """Reads one checkpoint. Pass it as `storage_reader`, a new one for each load.

    checkpointer: an open Checkpointer.
    step: the step to read. It may be left out: the restore point of this round is read then, which is the
      newest step of a folder.
    """

    def __init__(self, checkpointer: Checkpointer, step: int | None = None) -> None:
        warn_if_untested("torch")
        self._checkpointer = checkpointer
        self._step = step
        self._found: RestorePoint | None = None

    @property
    def step(self) -> int | None:
        """The step that was read, or the one to read."""
        return self._step if self._found is None else self._found.step

    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        if checkpoint_id is not None:
            self._step = step_of(checkpoint_id)

    def look(self) -> RestorePoint:
        """Find the checkpoint and return what it holds. Further calls return the same.

        Raises NotFoundError if there is none, and what `Checkpointer.restore` raises.
        """
        if self._found is not None:
            return self._found
        found = self._checkpointer.restore_tensors({})
        if self._step is not None and (found is None or found.step != self._step):
            found = self._checkpointer.restore_tensors({}, step=self._step)
        if found is None:
            raise NotFoundError("StorageReader: there is no checkpoint to load")
        self._found = found
        return found

    def read_metadata(self, *args: Any) -> Metadata:
        # Without **kwargs, so that torch does not ask a second time for metadata of this rank alone.
        found = self.look()
        values = dict.fromkeys(_values(found), BytesStorageMetadata())
        tensors = {name: _one_chunk(one) for name, one in found.tensors.items()}
        return Metadata({**tensors, **values})

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        found = self.look()
        reads = Reads(plan, planner, {name: one.shape for name, one in found.tensors.items()})
        restored = self._checkpointer.restore_tensors(reads.tensors)
        if restored is None:
            raise NotFoundError(f"StorageReader: step {found.step} cannot be read any more")
        if restored.step != found.step:
            # The plan, and what the script knows about its position, belong to another step.
            raise CorruptionError(
                f"StorageReader: step {found.step} is damaged, and the tensors are those of step "
                f"{restored.step}: start again, or look and load again with a new StorageReader"
            )
        reads.finish(_values(found))
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        return StorageWriter.validate_checkpoint_id(checkpoint_id)


def _values(found: RestorePoint) -> Mapping[str, Any]:
    values = found.objects.get(OBJECTS)
    return values if isinstance(values, dict) else {}


def _one_chunk(saved: TensorInfo) -> TensorStorageMetadata:
    """Return metadata by which each rank plans one read for each of its parts."""
    size = torch.Size(saved.shape)
    chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
    return TensorStorageMetadata(TensorProperties(getattr(torch, saved.dtype)), size, [chunk])
