"""A run directory whose storage may be away for a while."""

from __future__ import annotations

from collections.abc import Callable

from prefect_elastic_train.storage.retries import Retries
from prefect_elastic_train.storage.store import RunStore


class RetryingStore:
    """Repeats the operations of another store while they fail with a passing fault.

    Args:
        inner: The store.
        retries: How.
    """

    def __init__(self, inner: RunStore, retries: Retries) -> None:
        self.inner = inner
        self.retries = retries

    @property
    def path(self) -> str:
        """See :meth:`RunStore.path`."""
        return self.inner.path

    @property
    def uri(self) -> str:
        """See :meth:`RunStore.uri`."""
        return self.inner.uri

    def impatient(self, seconds: float) -> RetryingStore:
        """Return the same store for those who rather do without than wait."""
        retries = Retries(min(seconds, self.retries.seconds), self.retries.where, self.retries.hidden)
        return RetryingStore(self.inner, retries)

    def create(self, name: str, data: bytes) -> bool:
        """See :meth:`RunStore.create`."""

        def create() -> bool:
            # A try whose answer was lost may have made it, and clients of HTTP repeat a PUT by themselves. What two
            # creators write is never the same: records hold an id or a time.
            return self.inner.create(name, data) or self.inner.read(name) == data

        return self.retries.call(f"create {name}", create)

    def replace(self, name: str, data: bytes) -> None:
        """See :meth:`RunStore.replace`."""
        self.retries.call(f"write {name}", lambda: self.inner.replace(name, data))

    def read(self, name: str) -> bytes | None:
        """See :meth:`RunStore.read`."""
        return self.retries.call(f"read {name}", lambda: self.inner.read(name))

    def names(self, folder: str) -> list[str]:
        """See :meth:`RunStore.names`."""
        return self.retries.call(f"list {folder}", lambda: self.inner.names(folder))

    def folders(self, folder: str = "") -> list[str]:
        """See :meth:`RunStore.folders`."""
        return self.retries.call(f"list {folder or 'the run'}", lambda: self.inner.folders(folder))

    def file_sizes(self, folder: str) -> dict[str, int] | None:
        """See :meth:`RunStore.file_sizes`."""
        return self.retries.call(f"list {folder}", lambda: self.inner.file_sizes(folder))

    def delete(self, name: str) -> None:
        """See :meth:`RunStore.delete`."""
        self.retries.call(f"delete {name}", lambda: self.inner.delete(name))

    def delete_folder(self, name: str, check: Callable[[], object] | None = None) -> bool:
        """See :meth:`RunStore.delete_folder`."""
        return self._emptied(name, lambda: self.inner.delete_folder(name, check))

    def empty_folder(self, name: str, check: Callable[[], object] | None = None) -> bool:
        """See :meth:`RunStore.empty_folder`."""
        return self._emptied(name, lambda: self.inner.empty_folder(name, check))

    def abandon_uploads(self) -> int:
        """See :meth:`RunStore.abandon_uploads`."""
        return self.retries.call("remove unfinished uploads", self.inner.abandon_uploads)

    def _emptied(self, name: str, work: Callable[[], bool]) -> bool:
        # A try that failed may have deleted all of it.
        return self.retries.call_counted(f"delete {name}", lambda tries: work() or tries > 0)
