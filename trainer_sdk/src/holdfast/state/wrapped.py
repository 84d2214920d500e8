"""Names of a module's tensors without the wrappers that the module has inside.

`torch.compile`, DistributedDataParallel and DataParallel put a module into another one, whose attribute
becomes a part of each name: `layer._orig_mod.weight`. A checkpoint has the names of the plain module, so that
it can be loaded, read and exported with and without the wrappers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

_ATTRIBUTES = ("_orig_mod", "module")


def attribute_of(module: Any) -> str | None:
    """Return the name of the attribute with the module that this one wraps, or None if it is no wrapper."""
    import torch

    if "_orig_mod" in module._modules:
        return "_orig_mod"
    if isinstance(module, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
        return "module"
    return None


def plain_names(module: Any, names: Iterable[str]) -> dict[str, str]:
    """Return the plain name of each name of a tensor in the module.

    Names that would be the same, because a wrapper has parameters of its own, stay as they are.
    """
    own = list(names)
    if not any(one in _ATTRIBUTES for name in own for one in name.split(".")):
        return dict(zip(own, own, strict=True))  # the usual case, without a visit of all submodules
    inner = {
        f"{path}.{attribute}" if path else attribute
        for path, one in module.named_modules(remove_duplicate=False)
        if (attribute := attribute_of(one)) is not None
    }
    plain = [_without(name, inner) for name in own]
    count = Counter(plain)
    return {
        name: short if count[short] == 1 else name for name, short in zip(own, plain, strict=True)
    }


def plain_state(module: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Return what the module's state_dict has returned, with plain names."""
    names = plain_names(module, state)
    if all(name == plain for name, plain in names.items()):
        return state
    return {names[name]: value for name, value in state.items()}


def _without(name: str, inner: set[str]) -> str:
    """Return a name without the parts that lead from a wrapper to what it wraps."""
    path, kept = "", []
    for part in name.split("."):
        path = f"{path}.{part}" if path else part
        if path not in inner:
            kept.append(part)
    return ".".join(kept)
