"""A run directory for those who only look: each thing is read once, and nothing can be written."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

Answer = TypeVar("Answer")
Owner = TypeVar("Owner")


class once(Generic[Owner, Answer]):
    """A property that is worked out when it is first asked for.

    As :class:`functools.cached_property`, whose lock, before Python 3.12, is one for all instances: a thread that waits
    for its storage would hold up those that look at other runs.
    """

    def __init__(self, work_out: Callable[[Owner], Answer]) -> None:
        self._work_out = work_out
        self.__doc__ = work_out.__doc__

    def __get__(self, owner: Owner, owner_type: type[Owner]) -> Answer:
        answer = owner.__dict__[self._work_out.__name__] = self._work_out(owner)
        return answer


class RunReader(Protocol):
    """The half of a :class:`RunStore` that writes nothing."""

    @property
    def path(self) -> str:
        """See :meth:`RunStore.path`."""
        ...

    @property
    def uri(self) -> str:
        """See :meth:`RunStore.uri`."""
        ...

    def read(self, name: str) -> bytes | None:
        """See :meth:`RunStore.read`."""
        ...

    def names(self, folder: str) -> list[str]:
        """See :meth:`RunStore.names`."""
        ...

    def folders(self, folder: str = "") -> list[str]:
        """See :meth:`RunStore.folders`."""
        ...

    def file_sizes(self, folder: str) -> dict[str, int] | None:
        """See :meth:`RunStore.file_sizes`."""
        ...


class RunView:
    """A run directory as it was when it was first asked for each thing. For one thread.

    Args:
        store: The run directory.
    """

    def __init__(self, store: RunReader) -> None:
        self._store = store
        self._known: dict[tuple[str, str], object] = {}
        self._lists_at_once = not getattr(store, "has_folders", True)

    @property
    def path(self) -> str:
        """See :meth:`RunStore.path`."""
        return self._store.path

    @property
    def uri(self) -> str:
        """See :meth:`RunStore.uri`."""
        return self._store.uri

    def read(self, name: str) -> bytes | None:
        """See :meth:`RunStore.read`."""
        return self._once("read", name, self._store.read)

    def names(self, folder: str) -> list[str]:
        """See :meth:`RunStore.names`."""
        return self._once("names", folder, self._store.names)

    def folders(self, folder: str = "") -> list[str]:
        """See :meth:`RunStore.folders`."""
        return self._once("folders", folder, self._store.folders)

    def file_sizes(self, folder: str) -> dict[str, int] | None:
        """See :meth:`RunStore.file_sizes`.

        An object store is asked once for all that the run holds, which comes a thousand objects at a time.
        """
        if not folder or not self._lists_at_once:
            return self._once("file_sizes", folder, self._store.file_sizes)
        everything = self._once("listing", "", lambda _: sorted((self.file_sizes("") or {}).items()))
        prefix = f"{folder}/"
        sizes: dict[str, int] = {}
        for position in range(bisect_left(everything, (prefix, 0)), len(everything)):
            name, size = everything[position]
            if not name.startswith(prefix):
                break
            sizes[name.removeprefix(prefix)] = size
        return sizes or None

    def _once(self, what: str, name: str, ask: Callable[[str], Answer]) -> Answer:
        key = (what, name)
        if key not in self._known:
            self._known[key] = ask(name)
        return self._known[key]  # type: ignore[return-value]
