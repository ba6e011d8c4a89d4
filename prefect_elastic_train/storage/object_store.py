"""Small objects of a run directory in an object store: exclusive creation and plain puts are atomic there."""

from __future__ import annotations

from collections.abc import Callable

from prefect_elastic_train.storage.faults import diagnose
from prefect_elastic_train.storage.objects import ObjectClient

#: So often a folder is swept into which somebody still writes.
_SWEEPS = 10


class ObjectRunStore:
    """A run directory in an object store. Nothing is repeated here.

    Args:
        client: Of the store.
        path: The run directory, beginning with the bucket.
    """

    def __init__(self, client: ObjectClient, path: str) -> None:
        self._client = client
        self._path = path.strip("/")

    @property
    def client(self) -> ObjectClient:
        """Of the store."""
        return self._client

    @property
    def path(self) -> str:
        """See :meth:`RunStore.path`."""
        return self._path

    @property
    def uri(self) -> str:
        """See :meth:`RunStore.uri`."""
        return f"{self._client.scheme}{self._path}"

    def create(self, name: str, data: bytes) -> bool:
        """See :meth:`RunStore.create`."""
        try:
            self._client.put(self._key(name), data, create=True)
        except FileExistsError:
            return False
        return True

    def replace(self, name: str, data: bytes) -> None:
        """See :meth:`RunStore.replace`."""
        self._client.put(self._key(name), data)

    def read(self, name: str) -> bytes | None:
        """See :meth:`RunStore.read`."""
        try:
            return self._client.get(self._key(name))
        except FileNotFoundError as error:
            if diagnose(error) is not None:  # no bucket is something else than no object
                raise
            return None

    def names(self, folder: str) -> list[str]:
        """See :meth:`RunStore.names`."""
        return sorted(self._client.ls(self._key(folder))[0])

    def folders(self, folder: str = "") -> list[str]:
        """See :meth:`RunStore.folders`."""
        return self._client.ls(self._key(folder))[1]

    def file_sizes(self, folder: str) -> dict[str, int] | None:
        """See :meth:`RunStore.file_sizes`. A store has no empty folders."""
        return self._client.find(self._key(folder)) or None

    def delete(self, name: str) -> None:
        """See :meth:`RunStore.delete`."""
        self._client.delete([self._key(name)])

    def delete_folder(self, name: str, check: Callable[[], object] | None = None) -> bool:
        """See :meth:`RunStore.delete_folder`.

        A caller that is stopped between the check and the request may delete what has taken a name since: a store
        cannot hold a folder.
        """
        folder = self._key(name)
        found = False
        for _ in range(_SWEEPS):
            names = self._client.find(folder)
            if not names:
                break
            found = True
            if check is not None:
                check()
            self._client.delete(f"{folder}/{below}" for below in names)
        return found

    def empty_folder(self, name: str, check: Callable[[], object] | None = None) -> bool:
        """See :meth:`RunStore.empty_folder`. An empty folder is none here."""
        return self.delete_folder(name, check)

    def abandon_uploads(self) -> int:
        """See :meth:`RunStore.abandon_uploads`."""
        return self._client.abort_uploads(self._path)

    def _key(self, name: str) -> str:
        return f"{self._path}/{name}".rstrip("/")
