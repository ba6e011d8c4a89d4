"""A secret of a storage block is nowhere to be read, whatever becomes of the training."""

from __future__ import annotations

import json
import os
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from prefect_elastic_train import S3Storage
from tests.support.buckets import BUCKET, Bucket
from tests.support.processes import FlowProcess, RayHead, prefect_server
from tests.support.s3 import FaultProxy, MotoServer


class Canary:
    """A secret, and a look at all that everybody can read."""

    def __init__(self) -> None:
        self.words = {kind: f"CANARY{kind}{secrets.token_hex(8)}" for kind in ("KEY", "SECRET", "TOKEN")}

    def is_in(self, data: bytes) -> list[str]:
        """Give which words some bytes hold."""
        return [kind for kind, word in self.words.items() if word.encode() in data]

    def in_files(self, folder: Path) -> list[str]:
        """Give the files below a folder that hold one."""
        found = []
        for path in folder.rglob("*"):
            try:
                if path.is_file() and not path.is_symlink() and (words := self.is_in(path.read_bytes())):
                    found.append(f"{path}: {words}")
            except OSError:
                continue
        return found

    def in_processes(self, besides: set[int]) -> list[str]:
        """Give the processes whose arguments or environment hold one."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            for part in ("cmdline", "environ"):
                try:
                    words = self.is_in((process / part).read_bytes())
                except OSError:
                    continue
                if words and int(process.name) not in besides:
                    found.append(f"{process.name} {part}: {words}")
        return found


class Watch:
    """Looks at all processes again and again, until it is told to stop."""

    def __init__(self, canary: Canary) -> None:
        self._canary = canary
        self._stop = threading.Event()
        self.found: set[str] = set()
        self.looks = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.3):
            self.found |= set(self._canary.in_processes({os.getpid()}))
            self.looks += 1

    def close(self) -> None:
        self._stop.set()
        self._thread.join(10)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A Prefect server whose database can be looked into."""
    with prefect_server(tmp_path / "server") as url:
        yield url, tmp_path / "server"


@pytest.fixture
def cluster() -> Iterator[RayHead]:
    """A cluster whose logs can be looked into."""
    head = RayHead(cpus=2, dashboard=True)
    yield head
    head.close()


def _train(folder: Path, api_url: str, block: dict[str, Any], **more: Any) -> FlowProcess:
    ledger = str(folder.with_suffix(".jsonl"))
    return FlowProcess(
        folder,
        api_url,
        loop="tests.support.loops:hashing_loop",
        framework="none",
        config={"steps": 30, "checkpoint_every": 5, "sleep": 0.05, "ledger": ledger},
        scaling={"min_workers": 2, "max_workers": 2},
        storage="training-storage-s3/canary",
        cluster=block,
        **more,
    )


def _driver(flow: FlowProcess, cluster: RayHead, *, job: bool) -> psutil.Process | None:
    return cluster.job_driver() if job else flow.driver()


@pytest.mark.parametrize(
    "job", [pytest.param(False, id="joined cluster"), pytest.param(True, id="job", marks=pytest.mark.full)]
)
def test_the_secrets_of_a_storage_are_nowhere_to_be_read(
    tmp_path: Path, server: tuple[str, Path], cluster: RayHead, job: bool
) -> None:
    from prefect.settings import PREFECT_API_URL, temporary_settings

    api_url, server_folder = server
    canary = Canary()
    with MotoServer() as moto, FaultProxy(moto.endpoint_url) as proxy:
        moto.create_bucket(BUCKET)
        bucket = Bucket(moto, proxy, "runs")
        proxy.allow_keys({canary.words["KEY"]})
        proxy.allow_tokens({canary.words["TOKEN"]})
        block = S3Storage(
            **{
                **bucket.block,
                "access_key_id": canary.words["KEY"],
                "secret_access_key": canary.words["SECRET"],
                "session_token": canary.words["TOKEN"],
            }
        )
        with temporary_settings({PREFECT_API_URL: api_url}):
            block.save("canary")
        watch = Watch(canary)
        flows = []
        try:
            block_of_cluster = cluster.jobs_block if job else cluster.block
            flows.append(_train(tmp_path / "good", api_url, block_of_cluster))
            flows[0].wait_for(lambda: bucket.records("commits"), 120, "a commit")
            driver = _driver(flows[0], cluster, job=job)
            assert driver is not None
            driver.kill()
            good = flows[0].wait(180)
            proxy.allow_tokens({"another"})
            flows.append(_train(tmp_path / "bad", api_url, block_of_cluster))
            bad = flows[1].wait(120)
            shown = [cluster.dashboard("GET", f"/api/{what}") for what in ("jobs/", "v0/actors?detail=1", "v0/jobs")]
            assert canary.is_in(json.dumps(shown).encode()) == [], "what Ray's dashboard shows"
        finally:
            watch.close()
            for flow in flows:
                flow.close()
        assert (good["state"], good["result"]["attempts"]) == ("COMPLETED", 2), flows[0].log[-3000:]
        assert good["result"]["storage_block"] == "training-storage-s3/canary"
        assert (bad["state"], bad["outcome"]) == ("FAILED", "storage_error")
        assert watch.looks > 10
        assert watch.found == set(), "arguments and environments of processes"
        objects = {key: moto.client().get_object(Bucket=BUCKET, Key=key)["Body"].read() for key in moto.keys(BUCKET)}
        assert len(objects) > 10
        assert {key: canary.is_in(data) for key, data in objects.items() if canary.is_in(data)} == {}
    assert list(cluster.folder.rglob("*.log")), "there are logs to look into"
    found = canary.in_files(cluster.folder)
    # What a job brings along is readable inside the cluster, and documented to be.
    packages = [name for name in found if "/runtime_resources/" in name]
    assert bool(packages) == job
    assert [name for name in found if name not in packages] == [], "Ray's session logs"
    assert list(server_folder.rglob("prefect.db")), "there is a database to look into"
    assert canary.in_files(server_folder) == [], "Prefect's blocks, artifacts, events, logs and parameters"
    assert canary.in_files(tmp_path) == [], "logs and results of the flow processes"
    assert json.loads((tmp_path / "good" / "result.json").read_text())["state"] == "COMPLETED"
