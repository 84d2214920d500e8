"""Imports DeepSpeed for the CPU, without the compiler that it would start."""

from __future__ import annotations

import os

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed as deepspeed

# Otherwise DeepSpeed compiles a C++ module for collectives in shared memory, which takes a minute.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
