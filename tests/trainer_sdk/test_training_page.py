"""The code of docs/training.md runs, in a script that has the names it uses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import holdfast

ROOT = Path(__file__).resolve().parents[2]
_FOLDER = 'Checkpointer("ckpt", interval_steps=3, when_busy="wait", on_save_error="raise")'


def blocks() -> list[str]:
    """Return the Python code of the page, block by block."""
    text = (ROOT / "docs/training.md").read_text()
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def block_with(text: str) -> str:
    found = [block for block in blocks() if text in block]
    assert len(found) == 1, f"expected one block with {text!r}, found {len(found)}"
    return found[0]


class Batches:
    """A data object that counts its position."""

    def __init__(self) -> None:
        self.position = 0

    def next(self) -> tuple[torch.Tensor]:
        self.position += 1
        return (torch.full((2, 3), float(self.position)),)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Summed(torch.nn.Linear):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs).square().mean()


def script(total: int) -> dict[str, Any]:
    """Return the names that the fragments take from the script around them."""
    torch.manual_seed(5)
    model = Summed(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    batches = Batches()
    return {
        "holdfast": holdfast,
        "torch": torch,
        "DataLoader": DataLoader,
        "model": model,
        "optimizer": optimizer,
        "schedule": schedule,
        "batches": batches,
        "total": total,
        "state": {"model": model, "optim": optimizer, "data": batches, "rng": holdfast.RNG()},
    }


def run(code: str, names: dict[str, Any]) -> dict[str, Any]:
    exec(compile(code, "page", "exec"), names)
    return names


def bits(module: torch.nn.Module) -> list[Any]:
    return [value.tolist() for value in module.state_dict().values()]


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_every_block_of_the_training_page_has_a_test_here() -> None:
    tested = set(re.findall(r"^    # FRAGMENT: (.*)$", Path(__file__).read_text(), re.MULTILINE))
    assert {block.splitlines()[0] for block in blocks()} == tested


def test_the_loop() -> None:
    # FRAGMENT: import holdfast
    code = block_with("for step in ckpt.steps(")
    code = code.replace("Checkpointer()", _FOLDER)
    for total in (4, 9):
        resumed = run(code.replace("10_000", str(total)), script(total))
    assert resumed["batches"].position == 9
    (Path("ckpt")).rename("other")
    whole = run(code.replace("10_000", "9"), script(9))
    assert bits(resumed["model"]) == bits(whole["model"])


def test_a_loop_without_the_generator_and_a_look_at_its_restore_point() -> None:
    # FRAGMENT: start = ckpt.restore(state) or 0
    code = block_with("ckpt.should_save(step)")
    # FRAGMENT: point = ckpt.peek()
    look = block_with("ckpt.peek()")
    for total in (4, 9):
        names = script(total)
        names["state"]["config"] = {"width": 512}
        with holdfast.Checkpointer("ckpt", interval_steps=3, when_busy="wait") as ckpt:
            names["ckpt"] = ckpt
            run(look, names)
            run(code, names)
        names["handle"].wait("local", timeout=600)
        assert names["handle"].failure is None
    assert (names["start"], names["step"], names["point"].step) == (4, 9, 4)


def test_a_script_skips_the_data_that_was_read_before_a_rollback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The position is saved, so that a restart below that step skips nothing again."""
    # FRAGMENT: # First in the body of the loop, before a batch is read: nothing is skipped twice.
    code = block_with("ckpt.rolled_back_from")
    read = []
    for reached in (None, "7", "7", None):
        monkeypatch.setenv("HOLDFAST_ROLLED_BACK_FROM", reached or "")
        names = script(99)
        with holdfast.Checkpointer("ckpt", interval_steps=1, when_busy="wait") as ckpt:
            names["ckpt"] = ckpt
            for step in ckpt.steps(99, names["state"]):
                run(code, names)
                names["batches"].next()
                read.append(names["batches"].position)
                if step % 2:
                    ckpt.save(step + 1, names["state"])
                    break
    assert read == [1, 2, 8, 9, 10, 11, 12, 13]


def test_generators_are_restored_later() -> None:
    # FRAGMENT: ckpt.restore(state, rng="later")  # or ckpt.steps(total, state, rng="later")
    code = block_with("ckpt.restore_rng()")
    for expected in (None, 1):
        names = script(1)
        with holdfast.Checkpointer("ckpt", interval_steps=1, when_busy="wait") as ckpt:
            run(code, {**names, "ckpt": ckpt})
            assert ckpt.restored_step == expected
            if expected is None:
                ckpt.save(1, names["state"]).wait("local", timeout=600)


def test_numbers_of_a_batch_depend_on_its_samples() -> None:
    # FRAGMENT: from holdfast.data import indexed, keyed
    code = block_with("keyed(collate, seed=7)").replace("num_workers=4", "")

    def collate(samples: list[float]) -> torch.Tensor:
        return torch.tensor(samples) + torch.rand(len(samples))

    names = {**script(1), "dataset": [1.0, 2.0, 3.0], "collate": collate, "epochs": 2}
    loader = run(code, names)["loader"]
    assert [one.tolist() for one in loader] == [one.tolist() for one in loader]


def test_checkpointers_of_a_folder_and_of_a_store(tmp_path: Path) -> None:
    # FRAGMENT: holdfast.Checkpointer(holdfast.Folder("ckpt", keep_last=3), interval_steps=50)
    folder = block_with("keep_last=3), interval_steps=50")
    # FRAGMENT: holdfast.Checkpointer(holdfast.Folder("ckpt", store="s3://bucket/run-7", store_keep_last=3))
    store = block_with("store_keep_last=3")
    store = store.replace("s3://bucket/run-7", f"file://{tmp_path}/store")
    for level, code in (("local", folder), ("persisted", store)):
        with eval(code.strip(), {"holdfast": holdfast}) as ckpt:
            ckpt.restore({"x": torch.ones(1)})
            ckpt.save(len(level), {"x": torch.ones(1)}).wait(level, timeout=600)


def test_a_part_of_a_tensor() -> None:
    # FRAGMENT: rows = torch.zeros(256, 64)  # rows 512 to 767 of a tensor of 1024 x 64
    names = run(block_with("rows.global_shape"), script(1))
    with holdfast.Checkpointer("ckpt", on_save_error="raise") as ckpt:
        ckpt.save(1, names["state"]).wait("local", timeout=600)
        point = ckpt.peek()
    assert point.tensors["table"].shape == (1024, 64)


def test_a_fake_sidecar(tmp_path: Path) -> None:
    # FRAGMENT: from holdfast.testing import FakeSidecar
    names = run(block_with("FakeSidecar"), {"tmp_path": tmp_path})
    assert names["env"]["HOLDFAST_ROUND"] == "0"


def test_reading_a_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    # FRAGMENT: with holdfast.open("ckpt") as folder:
    with holdfast.Checkpointer("ckpt", when_busy="wait", on_save_error="raise") as ckpt:
        for step in (100, 200, 300):
            weight = torch.nn.Parameter(torch.full((1200, 2), float(step)))
            model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(1200, 2, _weight=weight)})
            state = {"model": model, "data": {"epoch": step // 100}}
            ckpt.save(step, state).wait("local", timeout=600)
    code = block_with('with holdfast.open("ckpt") as folder:')
    names = run(code, {"holdfast": holdfast})
    assert "(100, 200, 300)" in capsys.readouterr().out
    assert names["epoch"] == 2
    assert names["rows"].shape == (1000, 2)
