"""The harness of the adapters' tests itself, with a loop that needs no framework."""

from __future__ import annotations

from pathlib import Path

from tests.support.frameworks.kills import python, train

SCRIPT = """
import torch
import holdfast
from tests.support.frameworks.digest import digest_of

torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
with holdfast.Checkpointer("ckpt", interval_steps=1, when_busy="wait") as ckpt:
    state = {"model": model, "optimizer": optimizer, "rng": holdfast.RNG()}
    for index in ckpt.steps(total=40, state=state):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        print("step", index + 1)
print("digest", digest_of(model.parameters()))
"""


def test_a_killed_training_ends_in_the_same_bits(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    folders = [tmp_path / name for name in ("whole", "killed")]
    for folder in folders:
        folder.mkdir()
    whole = train(python(script), folders[0])
    killed = train(python(script), folders[1], kills=3, most_steps=5)
    assert killed.digest == whole.digest
    assert whole.starts == (1,)
    assert max(killed.starts) > 1
