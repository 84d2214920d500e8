"""The gang's store (torch.distributed.Store, as far as it is used) within one process."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class DictStore:
    """Holds everything in `values`; a key that is not there is a KeyError, never a wait."""

    values: dict[str, str] = field(default_factory=dict)

    def set(self, key: str, value: str, /) -> None:
        self.values[key] = value

    def get(self, key: str, /) -> bytes:
        return self.values[key].encode()

    def check(self, keys: list[str], /) -> bool:
        return all(key in self.values for key in keys)
