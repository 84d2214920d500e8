"""Peers that save a state dict to a disk, each as its documentation recommends for one rank on a CPU."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.datapath.saver import MakeSaver, Saver, Started
from benchmarks.peers.compile import prepare

_COMMIT_SECONDS = 60.0


class _Functions:
    """A Saver of two functions, which is sufficient for most peers."""

    def __init__(
        self,
        start: Callable[[int], Started],
        load: Callable[[Path, dict[str, Any]], None],
        close: Callable[[], object] = lambda: None,
    ) -> None:
        self.start = start
        self.load = load
        self.close = close


def _done() -> None:
    return None


def _copy(source: dict[str, Any], into: dict[str, Any]) -> None:
    for name, tensor in into.items():
        tensor.copy_(source[name])


def _process_group() -> None:
    import torch.distributed as dist

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK="0",
        WORLD_SIZE="1",
        LOCAL_RANK="0",
        LOCAL_WORLD_SIZE="1",
    )
    dist.init_process_group("gloo", rank=0, world_size=1)


def torch_save(state: dict[str, Any], directory: Path) -> Saver:
    import torch

    def start(step: int) -> Started:
        path = directory / f"{step}.pt"
        torch.save(state, path)
        return Started(path, _done)

    return _Functions(start, lambda path, into: _copy(torch.load(path), into))


def safetensors(state: dict[str, Any], directory: Path) -> Saver:
    from safetensors.torch import load_file, save_file

    def start(step: int) -> Started:
        path = directory / f"{step}.safetensors"
        save_file(state, path)
        return Started(path, _done)

    return _Functions(start, lambda path, into: _copy(load_file(path), into))


def dcp_sync(state: dict[str, Any], directory: Path) -> Saver:
    from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
    from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

    def start(step: int) -> Started:
        path = directory / str(step)
        dcp_save(state, storage_writer=FileSystemWriter(path), no_dist=True)
        return Started(path, _done)

    def load(path: Path, into: dict[str, Any]) -> None:
        dcp_load(into, storage_reader=FileSystemReader(path), no_dist=True)

    return _Functions(start, load)


def dcp_thread(state: dict[str, Any], directory: Path) -> Saver:
    """Return a saver of `async_save` with defaults: a thread writes, each save copies to new memory."""
    return _dcp_async(state, directory, process=False)


def dcp_process(state: dict[str, Any], directory: Path) -> Saver:
    """Return a saver of `async_save` at its fastest: a process writes, the copy goes to reused memory."""
    return _dcp_async(state, directory, process=True)


def _dcp_async(state: dict[str, Any], directory: Path, *, process: bool) -> Saver:
    import torch.distributed as dist
    from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

    _process_group()
    options: dict[str, Any] = {"async_checkpointer_type": AsyncCheckpointerType.THREAD}
    if process:
        stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=True,
                use_async_staging=False,
                use_non_blocking_copy=False,
            )
        )
        options = {
            "async_checkpointer_type": AsyncCheckpointerType.PROCESS,
            "async_stager": stager,
        }

    def start(step: int) -> Started:
        path = directory / str(step)
        reply: Any = async_save(state, storage_writer=FileSystemWriter(path), **options)
        upload = getattr(reply, "upload_completion", reply)
        return Started(path, upload.result)

    def load(path: Path, into: dict[str, Any]) -> None:
        dcp_load(into, storage_reader=FileSystemReader(path))

    return _Functions(start, load, dist.destroy_process_group)


def dlrover(state: dict[str, Any], directory: Path) -> Saver:
    """Return a saver of Flash checkpoint.

    A save copies the state to shared memory. DLRover's agent writes it, and commits with a tracker file.
    """
    os.environ.setdefault("ELASTIC_JOB_NAME", f"holdfast-bench-{os.getpid()}")
    _process_group()
    import torch
    from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType

    root = directory / "flash"
    root.mkdir()
    checkpointer = DdpCheckpointer(str(root))
    tracker = root / "dlrover_latest.txt"

    def forget() -> None:
        # DLRover keeps these for a restart of its agent. Here the next visit would find them.
        Path("/dev/shm/ckpt_shm_0").unlink(missing_ok=True)
        shutil.rmtree("/tmp/ckpt_sock", ignore_errors=True)

    def committed(step: int) -> bool:
        try:
            return tracker.read_text().strip() == str(step)
        except OSError:
            return False

    def wait(step: int) -> None:
        deadline = time.monotonic() + _COMMIT_SECONDS
        while not committed(step):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{tracker} did not report step {step} within {_COMMIT_SECONDS:g} s"
                )
            time.sleep(0.002)

    def start(step: int) -> Started:
        path = root / f"checkpoint-{step}.pt"
        checkpointer.save_checkpoint(
            step, {"model": state}, str(path), storage_type=StorageType.DISK
        )
        return Started(path, lambda: wait(step))

    return _Functions(start, lambda path, into: _copy(torch.load(path)["model"], into), forget)


def torchsnapshot(state: dict[str, Any], directory: Path) -> Saver:
    from torchsnapshot import Snapshot, StateDict

    source = StateDict(**_flat(state))

    def start(step: int) -> Started:
        path = directory / str(step)
        pending = Snapshot.async_take(str(path), {"model": source})
        return Started(path, pending.wait)

    def load(path: Path, into: dict[str, Any]) -> None:
        Snapshot(str(path)).restore({"model": StateDict(**_flat(into))})

    return _Functions(start, load)


def _flat(state: dict[str, Any]) -> dict[str, Any]:
    return {name.replace(".", "_"): tensor for name, tensor in state.items()}


def fast_file_writer(state: dict[str, Any], directory: Path) -> Saver:
    """Return a saver of torch.save over DeepSpeed's FastPersist writer (O_DIRECT, double buffer)."""
    prepare()
    import torch
    from deepspeed.io import FastFileWriter, FastFileWriterConfig
    from deepspeed.ops.op_builder import AsyncIOBuilder, UtilsBuilder

    class _Utilities:
        """The only function that is used of an operator without a CPU build."""

        @staticmethod
        def cast_to_byte_tensor(tensors: Any) -> Any:
            if isinstance(tensors, list | tuple):
                return [t.reshape(-1).view(torch.uint8) for t in tensors]
            return tensors.reshape(-1).view(torch.uint8)

    UtilsBuilder.load = lambda self, verbose=True: _Utilities
    handle = (
        AsyncIOBuilder()
        .load(verbose=False)
        .aio_handle(
            block_size=8 << 20,
            queue_depth=8,
            single_submit=False,
            overlap_events=True,
            intra_op_parallelism=1,
        )
    )
    buffer = handle.new_cpu_locked_tensor(64 << 20, torch.empty(0, dtype=torch.uint8))

    def start(step: int) -> Started:
        path = directory / f"{step}.pt"
        writer = FastFileWriter(
            str(path),
            FastFileWriterConfig(
                dnvme_handle=handle,
                pinned_tensor=buffer,
                double_buffer=True,
                num_parallel_writers=1,
                writer_rank=0,
            ),
        )
        torch.save(state, writer, _use_new_zipfile_serialization=False)
        writer.close()
        return Started(path, _done)

    return _Functions(start, lambda path, into: _copy(torch.load(path), into))


SAVERS: dict[str, MakeSaver] = {
    "torch.save": torch_save,
    "safetensors": safetensors,
    "dcp-sync": dcp_sync,
    "dcp-thread": dcp_thread,
    "dcp-process": dcp_process,
    "dlrover": dlrover,
    "torchsnapshot": torchsnapshot,
    "fast-file-writer": fast_file_writer,
}
