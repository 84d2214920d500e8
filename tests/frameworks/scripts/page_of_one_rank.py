"""Runs the script of a page in one process: `page_of_one_rank.py dcp.md [cuda]`.

Scripts that need a process group get a gang of one rank. Each prints `digest <hex>` at its end.
"""

import os
import sys

import torch
from tests.support.frameworks.devices import script_on_gpu
from tests.support.frameworks.digest import digest_of
from tests.support.frameworks.pages import script_of

# Port 0 lets the system choose, so that trainings can run side by side.
GANG = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
page, *device = sys.argv[1:]
text = script_of(page)
if device == ["cuda"]:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    text = script_on_gpu(page)
    if page == "megatron.md":
        from tests.support.frameworks import megatron_adam

        megatron_adam.install()
if "init_process_group" in text or "init_distributed" in text:
    os.environ.update({**GANG, "MASTER_PORT": "0"})
exec(compile(text, page, "exec"))
if "digest" not in text:
    print("digest", digest_of(globals()["model"].state_dict().values()), flush=True)
