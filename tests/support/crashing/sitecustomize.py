"""Kills this process at a chosen step of a commit, once: on ``PYTHONPATH`` of the processes of a test only.

The file that ``CRASH_FILE`` names holds the name of the step. Who takes the file away, dies there.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import signal
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def die_if_told(step: str) -> None:
    """Die here, if that is what the test wants and nobody has died yet."""
    path = os.environ.get("CRASH_FILE", "")
    try:
        with open(path) as file:
            if file.read().strip() != step:
                return
        os.rename(path, f"{path}.done")
    except OSError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def _patch_store(module: ModuleType) -> None:
    store = module.LocalRunStore
    create, replace, link = store.create, store.replace, os.link

    def mortal_create(self: Any, name: str, data: bytes) -> bool:
        if "/commits/" not in name:
            return bool(create(self, name, data))

        def mortal_link(*arguments: Any) -> None:
            die_if_told("in the middle of the commit")
            link(*arguments)

        os.link = mortal_link  # type: ignore[assignment]
        try:
            return bool(create(self, name, data))
        finally:
            os.link = link

    def mortal_replace(self: Any, name: str, data: bytes) -> None:
        if name != "checkpoint_manager_snapshot.json":
            replace(self, name, data)
            return
        replace(self, name, data)
        die_if_told("after Ray's file")

    store.create, store.replace = mortal_create, mortal_replace


def _patch_filesystem(module: ModuleType) -> None:
    copyfile = module.shutil.copyfile

    def mortal_copyfile(source: str, target: str, **options: Any) -> Any:
        if not source.endswith("state.json"):
            return copyfile(source, target, **options)
        if os.path.exists(os.environ.get("CRASH_FILE", "")):
            with open(source, "rb") as whole, open(target, "wb") as half:
                half.write(whole.read()[: os.path.getsize(source) // 2])
            die_if_told("mid-upload")
        return copyfile(source, target, **options)

    module.shutil.copyfile = mortal_copyfile


PATCHES: dict[str, Callable[[ModuleType], None]] = {
    "prefect_elastic_train.storage.store": _patch_store,
    "prefect_elastic_train.elastic.local_filesystem": _patch_filesystem,
}


class _Patching(importlib.abc.Loader):
    def __init__(self, loader: Any, patch: Callable[[ModuleType], None]) -> None:
        self._loader, self._patch = loader, patch

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._patch(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in PATCHES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None:
            spec.loader = _Patching(spec.loader, PATCHES[name])  # type: ignore[assignment]
        return spec


if os.environ.get("CRASH_FILE"):
    sys.meta_path.insert(0, _Finder())
