"""The spec of a driver: private, and loadable by a process that shares nothing with this one."""

import stat
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import pytest
from prefect.utilities.importtools import load_script_as_module

from prefect_elastic_train.core.payload import Payload, dump_payload
from prefect_elastic_train.core.request import read_spec, write_spec
from prefect_elastic_train.core.settings import ClusterSettings
from tests.unit.support import claim, python

_LOAD_AND_CALL = """
import pickle
with open(sys.argv[1], "rb") as file:
    payload = pickle.load(file)
print(payload.train_loop(payload.train_loop_config))
"""

SCRIPT = """
from dataclasses import dataclass

FACTOR = 3

@dataclass
class Model:
    weight: int

def scale(value):
    return FACTOR * value

def loop(config):
    return scale(Model(config["weight"]).weight)
"""
WITH_LOCK = "import threading\nLOCK = threading.Lock()\n\ndef loop(config):\n    with LOCK:\n        return 'locked'\n"


@pytest.fixture(autouse=True)
def _modules_as_before() -> Iterator[None]:
    """Forget the modules and folders that a test has brought in."""
    modules, path = set(sys.modules), list(sys.path)
    yield
    for name in set(sys.modules) - modules:
        del sys.modules[name]
    sys.path[:] = path


def _import(folder: Path, name: str, text: str) -> ModuleType:
    (folder / f"{name}.py").write_text(text)
    sys.path.insert(0, str(folder))
    return __import__(name)


def _called_elsewhere(
    loop: Callable[..., Any] | str, tmp_path: Path, config: dict[str, Any] | None = None, **environment: str
) -> str:
    """Send a loop to another process in another folder, call it there, and return what it returned."""
    file = tmp_path / "payload"
    file.write_bytes(dump_payload(Payload(train_loop=loop, train_loop_config=config)))
    return python(_LOAD_AND_CALL, str(file), **environment).stdout.strip()


def test_a_spec_comes_back_as_it_was_with_its_secrets_for_its_user_alone(tmp_path: Path) -> None:
    file = tmp_path / "spec"
    write_spec(claim(payload=b"x" * 10_000), file)  # the next one replaces the whole of it
    told = replace(claim(payload=b"no pickle at all"), cluster=ClusterSettings(auth_token="hush"), sys_path=["/code"])
    write_spec(told, file)
    assert read_spec(file) == told
    assert read_spec(file).cluster.auth_token.get_secret_value() == "hush"
    assert "hush" not in repr(told)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_script_and_the_helper_beside_it_go_by_value(tmp_path: Path) -> None:
    _import(tmp_path, "a_helper", SCRIPT)
    helped = "from a_helper import loop as help\n\ndef loop(config):\n    return 2 * help(config)\n"
    module = _import(tmp_path, "a_script_with_helper", helped)
    before = set(cloudpickle.list_registry_pickle_by_value())
    assert _called_elsewhere(module.loop, tmp_path, {"weight": 7}) == "42"
    assert set(cloudpickle.list_registry_pickle_by_value()) == before, "nothing has changed for others"


def test_a_script_that_prefect_loaded_goes_by_value(tmp_path: Path) -> None:
    script = tmp_path / "a_flow_script.py"
    script.write_text(SCRIPT)
    first, again = load_script_as_module(str(script)), load_script_as_module(str(script))
    assert again.__name__.startswith("__prefect_loader_")
    for module in (first, again):
        assert _called_elsewhere(module.loop, tmp_path, {"weight": 4}) == "12"


def test_a_package_goes_by_reference(tmp_path: Path) -> None:
    (tmp_path / "a_package").mkdir()
    (tmp_path / "a_package" / "__init__.py").touch()
    (tmp_path / "a_package" / "training.py").write_text("def loop(config):\n    return 'this file'\n")
    sys.path.insert(0, str(tmp_path))
    from a_package.training import loop  # type: ignore[import-not-found]

    assert b"this file" not in dump_payload(Payload(train_loop=loop))
    assert _called_elsewhere(loop, tmp_path, PYTHONPATH=str(tmp_path)) == "this file"


def test_a_script_that_holds_what_cannot_be_sent_goes_by_reference(tmp_path: Path) -> None:
    module = _import(tmp_path, "a_script_with_lock", WITH_LOCK)
    assert _called_elsewhere(module.loop, tmp_path, PYTHONPATH=str(tmp_path)) == "locked"


class _Slow:
    """What another thread may overtake while it is pickled."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()

    def __reduce__(self) -> tuple[Any, ...]:
        self.begun.set()
        self.may_end.wait(0.3)
        return dict, ()


def test_trainings_of_two_threads_send_a_script_without_disturbing_one_another(tmp_path: Path) -> None:
    module = _import(tmp_path, "a_script_sent_twice", SCRIPT)
    slow, sent = _Slow(), list[bytes]()

    def send():
        # Pickled in this order: the function goes by value only if its module still does after the wait.
        config = {"slow": slow, "function": module.loop}
        sent.append(dump_payload(Payload(train_loop="package.module:loop", train_loop_config=config)))

    first = threading.Thread(target=send)
    first.start()
    assert slow.begun.wait(5)
    dump_payload(Payload(train_loop=module.loop))
    slow.may_end.set()
    first.join(10)
    [data] = sent
    assert b"FACTOR" in data, "it went by the name of its script"
