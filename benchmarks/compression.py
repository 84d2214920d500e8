"""Measure how `object.compression: Zstd` compresses the state of a trained model, and random bytes.

    python -m benchmarks.compression --steps 200

Trains the example's GPT on one thread. Compresses weights, Adam's two moments, the weights as bf16 and
random bytes, chunk by chunk as an upload does. Prints for each the ratio of stored to original bytes, and
the MiB that are compressed and decoded in a second of processor time, as the best of three measurements.
The CRC32C and BLAKE3 digests that every upload and restore also computes are not included.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from pathlib import Path
from types import ModuleType

import torch

from holdfast_core.shards.coding import ChunkDecoder, ChunkEncoder
from holdfast_core.shards.file import CHUNK_BYTES
from holdfast_core.shards.pack import PLAIN

MIB = 1 << 20
EXAMPLE = Path(__file__).parent.parent / "examples" / "gpt" / "train.py"
REPETITIONS = 3
MAX_CHUNKS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=256)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    states, loss = trained(arguments.steps, arguments.width)
    print(f"after {arguments.steps} steps, loss {loss:.2f}")
    print("| state | MiB | stored of a byte | compress MiB/s | decode MiB/s |")
    print("|---|---|---|---|---|")
    for name, (data, width) in states.items():
        print(row(name, data, width), flush=True)


def trained(steps: int, width: int) -> tuple[dict[str, tuple[bytes, int]], float]:
    """Return the bytes and the item size of each state, and the last loss."""
    example = load_example()
    model = example.GPT(4, width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    corpus = torch.frombuffer(bytearray(example.CORPUS.read_bytes()), dtype=torch.uint8)
    batches = example.Batches(corpus, 8, 0, 1)
    loss = torch.tensor(0.0)
    for _ in range(steps):
        loss = model(*batches.next())
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        optimizer.step()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])

    def moment(name: str) -> bytes:
        return joined([optimizer.state[p][name] for p in model.parameters()])

    return {
        "fp32 weights": (joined([weights]), 4),
        "Adam exp_avg": (moment("exp_avg"), 4),
        "Adam exp_avg_sq": (moment("exp_avg_sq"), 4),
        "bf16 weights": (joined([weights.bfloat16().view(torch.int16)]), 2),
        "random bytes": (os.urandom(8 * MIB), 4),
    }, loss.item()


def load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example", EXAMPLE)
    if spec is None or spec.loader is None:
        sys.exit(f"{EXAMPLE} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def joined(tensors: list[torch.Tensor]) -> bytes:
    return b"".join(tensor.flatten().numpy().tobytes() for tensor in tensors)


def row(name: str, data: bytes, width: int) -> str:
    starts = range(0, len(data), CHUNK_BYTES)[:MAX_CHUNKS]
    chunks = [data[start : start + CHUNK_BYTES] for start in starts]
    total = sum(map(len, chunks))
    compressed = min(compress(chunks, width) for _ in range(REPETITIONS))
    encoder = ChunkEncoder()
    stored = [encoder.encode(chunk, width) for chunk in chunks]
    decoded = min(decode(chunks, stored, width) for _ in range(REPETITIONS))
    kept = sum(len(chunk if s is None else s) for chunk, s in zip(chunks, stored, strict=True))
    speeds = f"{total / MIB / compressed:.0f} | {total / MIB / decoded:.0f}"
    return f"| {name} | {total / MIB:.1f} | {kept / total:.3f} | {speeds} |"


def compress(chunks: list[bytes], width: int) -> float:
    encoder, begun = ChunkEncoder(), time.thread_time()
    for chunk in chunks:
        encoder.encode(chunk, width)
    return time.thread_time() - begun


def decode(chunks: list[bytes], stored: list[bytes | None], width: int) -> float:
    """Decode all chunks. Raises ValueError where a decoded chunk differs from the original."""
    decoder, place = ChunkDecoder(), memoryview(bytearray(CHUNK_BYTES))
    seconds = 0.0
    for chunk, coded in zip(chunks, stored, strict=True):
        begun = time.thread_time()
        data, how = (chunk, PLAIN) if coded is None else (coded, width)
        decoder.decode(memoryview(data), how, place[: len(chunk)])
        seconds += time.thread_time() - begun
        if place[: len(chunk)] != chunk:
            raise ValueError("a decoded chunk differs from its input")
    return seconds


if __name__ == "__main__":
    main()
