"""Saves that stream into a folder through a ring that is smaller than the state."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.support import zygote
from tests.support.crash.failpoints import PANIC_EXIT_CODE, in_every_python
from tests.support.hang import HANG_SECONDS
from tests.support.trainer.launched import committed_step, until

import holdfast
from holdfast_core.errors import CapacityError, ConfigError

MIB = 1 << 20
RING_BYTES = 16 * MIB
STATE_BYTES = 40 * MIB
mounts = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")


def state_of(step: int) -> dict[str, np.ndarray]:
    return {"t": np.random.default_rng(step).integers(0, 255, STATE_BYTES, dtype=np.uint8)}


def streaming(folder: Path, **options: object) -> holdfast.Checkpointer:
    return holdfast.Checkpointer(dir=folder, slots=0, ring_bytes=RING_BYTES, **options)  # type: ignore[arg-type]


def restored(folder: Path) -> int | None:
    """Restore into other bytes, and return the step if the bytes are those of that step."""
    state = state_of(1000)
    with streaming(folder) as ckpt:
        step = ckpt.restore(state)
    assert step is not None
    assert np.array_equal(state["t"], state_of(step)["t"])
    return step


def temporary_files(folder: Path) -> list[Path]:
    return list(folder.rglob(".tmp-*"))


def test_a_state_that_is_larger_than_its_ring(tmp_path: Path, memory: Path) -> None:
    with streaming(tmp_path, on_save_error="raise") as ckpt:
        for step in (1, 2):
            handle = ckpt.save(step, state_of(step))
            handle.wait(timeout=HANG_SECONDS)
        taken = sum(path.stat().st_blocks * 512 for path in memory.rglob("*.slot"))
        assert 0 < taken <= RING_BYTES + 8 * 4096
    assert restored(tmp_path) == 2


def test_a_step_that_is_saved_twice(tmp_path: Path) -> None:
    with streaming(tmp_path) as ckpt:
        ckpt.save(1, state_of(1)).wait(timeout=HANG_SECONDS)
        again = ckpt.save(1, state_of(1))
        again.wait(timeout=HANG_SECONDS)
        other = ckpt.save(1, state_of(2))
        assert "has saved step 1 with other bytes before" in str(other.failure)
    assert restored(tmp_path) == 1


@pytest.mark.parametrize("segment", [1, 10, 20])
def test_the_writer_is_killed_within_a_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, segment: int
) -> None:
    """The save fails, and the next persister takes the next save through the same ring."""
    folder = tmp_path / "ckpt"
    with monkeypatch.context() as patched:
        rule = f"stream.segment_read=panic@{segment}"
        for name, value in in_every_python(tmp_path, rule).items():
            patched.setenv(name, value)
        ckpt = streaming(folder)
        ckpt.open()
    with ckpt:
        failed = ckpt.save(1, state_of(1))
        assert failed.failure is not None
        state = state_of(2)

        def saved() -> bool:
            """Save again, at most once a second: the persister starts at a lower priority than this loop."""
            time.sleep(1)
            return ckpt.save(2, state).failure is None

        until(saved, "a save of the next persister", seconds=HANG_SECONDS)
    assert restored(folder) == 2
    assert temporary_files(folder) == []


@pytest.mark.parametrize("segment", [1, 10, 20])
def test_the_training_is_killed_within_a_stream(tmp_path: Path, segment: int) -> None:
    """Nothing of the step is committed, and the next run streams the same step again."""
    folder = tmp_path / "ckpt"
    program = (
        "from tests.trainer_sdk.directory.test_folder_streams import state_of, streaming\n"
        "from tests.support.crash.failpoints import failpoints\n"
        "from pathlib import Path\n"
        f"with streaming(Path({str(folder)!r})) as ckpt:\n"
        "    ckpt.save(1, state_of(1)).wait(timeout=60)\n"
        f"    with failpoints('stream.segment_copied=panic@{segment}'):\n"
        "        ckpt.save(2, state_of(2))\n"
    )
    killed = zygote.run([sys.executable, "-c", program], check=False, timeout=HANG_SECONDS)
    assert killed.returncode == PANIC_EXIT_CODE
    assert restored(folder) == 1
    with streaming(folder) as ckpt:
        assert ckpt.restore(state_of(1000)) == 1
        ckpt.save(2, state_of(2)).wait(timeout=HANG_SECONDS)
    assert restored(folder) == 2
    assert temporary_files(folder) == []


@mounts
def test_a_folder_that_becomes_full_within_a_stream(volume: Path) -> None:
    """There is room for one step of two. The second one fails, and training continues."""
    folder = volume / "ckpt"
    with streaming(folder, keep_last=3) as ckpt:
        ckpt.save(1, state_of(1)).wait(timeout=HANG_SECONDS)
        filler = volume / "filler"
        filler.write_bytes(bytes(STATE_BYTES))
        failed = ckpt.save(2, state_of(2))
        assert "room" in str(failed.failure)
        filler.unlink()
        ckpt.save(3, state_of(3)).wait(timeout=HANG_SECONDS)
    assert restored(folder) == 3
    assert temporary_files(folder) == []


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "volume"
    path.mkdir()
    size = 2 * STATE_BYTES + 8 * MIB
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(path)], check=True)
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=False)


def test_a_loop_that_is_left_early_saves_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with streaming(tmp_path, interval_steps=2) as ckpt:
        for index in ckpt.steps(10, state_of(1)):
            if index == 2:
                break
    assert committed_step(tmp_path) == 2
    assert "step 3 is not saved" in caplog.text


def test_a_state_without_room_is_refused_before_the_first_step(
    tmp_path: Path, memory: Path
) -> None:
    """The error names the bytes, and the settings that help."""
    with (
        holdfast.Checkpointer(dir=tmp_path) as ckpt,
        pytest.raises(CapacityError, match=r"needs \d+ more bytes for 2 slots.*slots=1.*slots=0"),
    ):
        ckpt.allocate({"t": np.lib.stride_tricks.as_strided(np.zeros(1), (1 << 44,), (0,))})


@pytest.mark.parametrize("ring_bytes", [(16 << 20) - 1, (64 << 30) + 1, "1Gi"])
def test_a_ring_out_of_bounds_is_refused(tmp_path: Path, ring_bytes: int) -> None:
    with pytest.raises(ConfigError, match="ring_bytes="):
        holdfast.Checkpointer(dir=tmp_path, slots=0, ring_bytes=ring_bytes)
