"""In-process double for the gang's store, with the methods of torch.distributed.Store that Holdfast uses."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class DictStore:
    """Store over `values`. A missing key raises KeyError instead of waiting."""

    values: dict[str, str] = field(default_factory=dict)

    def set(self, key: str, value: str, /) -> None:
        self.values[key] = value

    def get(self, key: str, /) -> bytes:
        return self.values[key].encode()

    def check(self, keys: list[str], /) -> bool:
        return all(key in self.values for key in keys)

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        if self.values.get(key, "") == expected:
            self.values[key] = desired
        return self.values.get(key, expected).encode()

    def add(self, key: str, amount: int, /) -> int:
        count = int(self.values.get(key, "0")) + amount
        self.values[key] = str(count)
        return count
