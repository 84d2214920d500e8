"""The objects of one job in an object store, by keys that are relative to the job's prefix."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta

from holdfast_core.errors import AlreadyExistsError, FormatError, TierError
from holdfast_core.format import keys
from holdfast_core.ids import CheckpointId
from holdfast_core.tiers.objects import Document, Listed, ObjectStore, Page


class JobObjects:
    """The objects of one job. It raises what the store raises."""

    def __init__(self, store: ObjectStore, prefix: str) -> None:
        self._store = store
        self.prefix = prefix

    def key(self, relative: str) -> str:
        """Return the key in the store."""
        return self.prefix + relative

    def get(self, relative: str) -> bytes:
        """Return a document. Raises NotFoundError."""
        return self._store.get(self.key(relative))

    def put(
        self,
        relative: str,
        document: bytes,
        is_damaged: Callable[[bytes], bool] | None = None,
    ) -> None:
        """Put a document if absent; replace one that is there if it cannot belong to this key.

        Raises AlreadyExistsError for another document.
        """
        try:
            self._store.write(self.key(relative), Document(document))
        except AlreadyExistsError:
            if is_damaged is None or not is_damaged(self.get(relative)):
                raise
            self._store.write(self.key(relative), Document(document), replace=True)

    def delete(self, relative: Iterable[str]) -> None:
        """Delete objects. Absent ones are ignored."""
        self._store.delete([self.key(key) for key in relative])

    def delete_below(self, below: str) -> int:
        """Delete all objects below a path, and return how many there were."""
        count = 0
        for page in pages(self._store, self.key(below)):
            self._store.delete([item.key for item in page.objects])
            count += len(page.objects)
        return count

    def list(self, below: str) -> Iterator[Listed]:
        """Yield all objects below a path, one page at a time. Their keys are relative."""
        for page in pages(self._store, self.key(below)):
            for item in page.objects:
                yield Listed(item.key.removeprefix(self.prefix), item.age)

    def parsed(self, below: str) -> Iterator[tuple[keys.Key, timedelta]]:
        """Yield key and age of all objects below a path, without those that Holdfast does not write."""
        for item in self.list(below):
            try:
                key = keys.parse_key(item.key)
            except FormatError:
                continue  # such an object is never deleted alone
            yield key, item.age

    def folders(self, kind: str) -> set[CheckpointId]:
        """Return the checkpoints that have objects of a kind."""
        found = (
            keys.checkpoint_of_folder(folder.removeprefix(self.prefix))
            for page in pages(self._store, f"{self.prefix}{kind}/", folders=True)
            for folder in page.folders
        )
        return {checkpoint for checkpoint in found if checkpoint is not None}

    def manifests(self) -> tuple[CheckpointId, ...]:
        """Return the checkpoints that have a manifest, by step and round. The manifests are not read."""
        found = (key for key, _ in self.parsed(f"{keys.MANIFESTS}/"))
        return tuple(sorted(key.checkpoint for key in found if isinstance(key, keys.ManifestKey)))


def pages(store: ObjectStore, prefix: str, *, folders: bool = False) -> Iterator[Page]:
    """Yield the pages of a listing. Raises TierError if the store lists a page a second time."""
    token, last = "", ""
    while True:
        page = store.list(prefix, token, folders=folders)
        yield page
        if not page.next:
            return
        listed = max((*(item.key for item in page.objects), *page.folders), default="")
        if listed <= last:
            raise TierError(f"list of {prefix}: expected keys behind {last!r}, found {listed!r}")
        token, last = page.next, listed


def folder_names(store: ObjectStore, prefix: str, *, all_pages: bool = False) -> list[str]:
    """Return the names of the folders below a prefix, which is empty or ends with a slash.

    Without `all_pages`, the list ends at a page with objects: another program has the folder, maybe with
    millions of them.
    """
    found = list[str]()
    for page in pages(store, prefix, folders=True):
        found += [folder[len(prefix) : -1] for folder in page.folders]
        if page.objects and not all_pages:
            break
    return found
