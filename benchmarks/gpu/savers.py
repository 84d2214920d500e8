"""What saves during the measured training: Holdfast in a folder, and torch DCP with page-locked memory."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.training import Training

_SAVE_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Saver:
    save: Callable[[int], Callable[[], object]]
    """Saves the present state as this step. Returns what waits until the save is complete."""
    close: Callable[[], object]


def holdfast_saver(training: Training, folder: Path) -> Saver:
    import holdfast

    ckpt = holdfast.Checkpointer(dir=folder / "holdfast", interval_steps=0)
    ckpt.open()
    state = training.state()
    ckpt.restore(state)
    ckpt.allocate(state)

    def save(step: int) -> Callable[[], object]:
        handle = ckpt.save(step, state)
        return lambda: handle.wait(timeout=_SAVE_SECONDS)

    return Saver(save, ckpt.close)


def dcp_saver(training: Training, folder: Path) -> Saver:
    """Return `async_save` as its documentation recommends for speed on a GPU.

    Its memory is page-locked and used again, its copies do not block, and a process writes. Without a GPU
    the copies block.
    """
    import torch.distributed as dist
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

    on_gpu = training.device.type == "cuda"
    with ExitStack() as stack:
        _join_alone("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
        stack.callback(dist.destroy_process_group)
        stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=on_gpu,
                use_shared_memory=True,
                use_async_staging=on_gpu,
                use_non_blocking_copy=on_gpu,
            )
        )
        stack.callback(_kept_open(stager))
        closing = stack.pop_all()
    previous: list[Any] = []

    def save(step: int) -> Callable[[], object]:
        for staging in previous:
            staging.result()  # the stager's memory must not be written by two saves
        previous.clear()
        model, optim = get_state_dict(training.model, training.optimizer)
        path = folder / "dcp" / str(step)
        reply: Any = async_save(
            {"model": model, "optim": optim},
            storage_writer=FileSystemWriter(path),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            async_stager=stager,
        )
        if hasattr(reply, "staging_completion"):
            previous.append(reply.staging_completion)
        upload = getattr(reply, "upload_completion", reply)

        def wait() -> None:
            upload.result(_SAVE_SECONDS)
            shutil.rmtree(path, ignore_errors=True)

        return wait

    def staged() -> None:
        """Make the optimizer's step wait for the copies, as DCP's documentation asks its users to do."""
        for staging in previous:
            staging.result()

    hook = training.optimizer.register_step_pre_hook(lambda *_: staged())
    closing.callback(hook.remove)
    return Saver(save, closing.close)


def _kept_open(stager: Any) -> Callable[[], object]:
    """Let the stager keep its memory from save to save. Returns what closes it.

    torch 2.11 closes the inner stager after each save: the next one fails with KeyError: <class 'type'>, or
    page-locks its memory again. Later releases close it only in `close`.
    """
    inner = stager._state_dict_stager
    close, inner.close = inner.close, lambda: None

    def close_both() -> None:
        stager.close()
        close()

    return close_both


def _join_alone(backend: str) -> None:
    import torch.distributed as dist

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group(backend, rank=0, world_size=1)
