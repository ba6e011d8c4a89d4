"""A secret of a storage block is nowhere to be read, whatever becomes of the training."""

import contextlib
import json
import os
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefect_elastic_train import S3Storage
from tests.support.buckets import BUCKET, Bucket
from tests.support.clusters import RayHead
from tests.support.loops import train_config
from tests.support.processes import Start
from tests.support.s3 import FaultProxy, MotoServer

pytestmark = pytest.mark.usefixtures("api")

#: By kind.
WORDS = {kind: f"CANARY{kind}{secrets.token_hex(8)}" for kind in ("KEY", "SECRET", "TOKEN")}


def _words_in(data: bytes) -> list[str]:
    return [kind for kind, word in WORDS.items() if word.encode() in data]


def _found_in(paths: list[Path]) -> list[str]:
    """The files that hold a word."""
    found = []
    for path in paths:
        with contextlib.suppress(OSError):
            if path.is_file() and not path.is_symlink() and (words := _words_in(path.read_bytes())):
                found.append(f"{path}: {words}")
    return found


@contextlib.contextmanager
def _watched() -> Iterator[list[list[str]]]:
    """What of arguments and environments of all other processes holds a word, at one look after the other."""
    looks: list[list[str]] = []
    stop = threading.Event()

    def look() -> None:
        while not stop.wait(0.3):
            others = [process for process in Path("/proc").glob("[0-9]*") if process.name != str(os.getpid())]
            looks.append(_found_in([process / part for process in others for part in ("cmdline", "environ")]))

    (thread := threading.Thread(target=look, daemon=True)).start()
    yield looks
    stop.set()
    thread.join(10)


@pytest.mark.parametrize(
    "job", [pytest.param(False, id="joined cluster"), pytest.param(True, id="job", marks=pytest.mark.full)]
)
def test_the_secrets_of_a_storage_are_nowhere_to_be_read(
    start: Start, tmp_path: Path, head: RayHead, server_folder: Path, job: bool
) -> None:
    with MotoServer() as moto, FaultProxy(moto.endpoint_url) as proxy:
        moto.create_bucket(BUCKET)
        bucket = Bucket(moto, proxy, "jobs" if job else "runs")  # the other case has used its own before
        proxy.allow_keys({WORDS["KEY"]})
        proxy.allow_tokens({WORDS["TOKEN"]})
        of_canary = {"access_key_id": "KEY", "secret_access_key": "SECRET", "session_token": "TOKEN"}
        block = S3Storage(**{**bucket.block, **{field: WORDS[kind] for field, kind in of_canary.items()}})
        block.save("canary", overwrite=True)
        training = {"storage": "training-storage-s3/canary", "cluster": head.jobs_block if job else head.block}
        with _watched() as looks:
            good = start("good", config=train_config(str(tmp_path / "good.jsonl")), **training)
            good.wait_for(lambda: bucket.records("commits"), 120, "a commit")
            (head.job_driver() if job else good.driver()).kill()
            result = good.completed(180)
            proxy.allow_tokens({"another"})
            bad = start("bad", config=train_config(str(tmp_path / "bad.jsonl")), **training).wait(120)
            shown = [head.dashboard("GET", f"/api/{what}") for what in ("jobs/", "v0/actors?detail=1", "v0/jobs")]
        assert (result["attempts"], result["storage_block"]) == (2, "training-storage-s3/canary")
        assert (bad["state"], bad["outcome"]) == ("FAILED", "storage_error")
        assert _words_in(json.dumps(shown).encode()) == [], "what Ray's dashboard shows"
        assert len(looks) > 10
        assert not any(looks), "arguments and environments of processes"
        objects = [*map(bucket.read, bucket.all_keys())]
        assert len(objects) > 10
        assert not any(map(_words_in, objects))
    assert list(head.folder.rglob("*.log")), "there are logs to look into"
    # What a job brings along is readable inside the cluster, and documented to be.
    found = _found_in(list(head.folder.rglob("*")))
    packages = [name for name in found if "/runtime_resources/" in name]
    assert bool(packages) == job
    assert found == packages, "Ray's session logs"
    assert list(server_folder.rglob("prefect.db")), "there is a database to look into"
    assert _found_in(list(server_folder.rglob("*"))) == [], "Prefect's blocks, artifacts, events, logs and parameters"
    assert _found_in(list(tmp_path.rglob("*"))) == [], "logs and results of the flow processes"
