"""What a checkpoint costs: transfers, blocked time, memory on S3; syncs on a disk: `python -m benchmarks.checkpoint`.

S3 is one server on this machine, which takes part of the same two cores: the ratios count.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import machine_lines, markdown_table, parse_arguments, ratio_target, summary
from tests.support.s3 import FaultProxy, MotoServer

MIB = 2**20
BUCKET = "benchmark"
KEY, SECRET = "AKIABENCHMARK", "benchmark-secret"
TRANSFER_SIZES = (256 * MIB, 1024 * MIB)
BLOCKED_SIZES = (MIB, 100 * MIB, 1024 * MIB)
BLOCKED_CHECKPOINTS = 3
LATENCY_SECONDS = 0.05
MEMORY_FILES = (1, 8)
MEMORY_BYTES = 2048 * MIB
MEMORY_LIMIT = 300 * MIB
PARTS = ("transfer", "blocked", "memory", "local")
LOCAL_FOLDER = "/var/tmp"
"""Where the run directory of the local part is, which should be on a disk."""
LOCAL_CHECKPOINTS = ((1, MIB), (1, 20 * MIB), (1, 100 * MIB), (1, 1000 * MIB), (1000, 10 * 1024))
"""How many files, and bytes of each."""
LOCAL_REPEATS = 7

Transfer = Callable[[Path, str], None]


def s3_settings(endpoint_url: str) -> Any:
    """Return the storage that all of ours use."""
    from prefect_elastic_train.core.settings import S3StorageSettings

    return S3StorageSettings(
        bucket_path=f"{BUCKET}/runs",
        endpoint_url=endpoint_url,
        region="us-east-1",
        access_key_id=KEY,
        secret_access_key=SECRET,
    )


def transfers(endpoint_url: str) -> dict[str, tuple[Transfer, Transfer]]:
    """Return, by name, how each client uploads a file and downloads an object."""
    import boto3
    import s3fs
    from pyarrow import fs

    from prefect_elastic_train.storage.opening import Storage

    ours = Storage(s3_settings(endpoint_url)).folder(BUCKET)
    boto = boto3.client(
        "s3", endpoint_url=endpoint_url, region_name="us-east-1", aws_access_key_id=KEY, aws_secret_access_key=SECRET
    )
    arrow = fs.S3FileSystem(
        access_key=KEY, secret_key=SECRET, endpoint_override=endpoint_url, region="us-east-1", scheme="http"
    )

    def of_ours() -> tuple[Transfer, Transfer]:
        return (
            lambda path, key: ours.upload(str(path), key),
            lambda path, key: ours.download(key.rpartition("/")[0], str(path.parent)),
        )

    def of_s3fs() -> tuple[Transfer, Transfer]:
        filesystem = s3fs.S3FileSystem(key=KEY, secret=SECRET, endpoint_url=endpoint_url, skip_instance_cache=True)
        return (
            lambda path, key: filesystem.put_file(str(path), f"{BUCKET}/{key}"),
            lambda path, key: filesystem.get_file(f"{BUCKET}/{key}", str(path)),
        )

    def of_boto() -> tuple[Transfer, Transfer]:
        return (
            lambda path, key: boto.upload_file(str(path), BUCKET, key),
            lambda path, key: boto.download_file(BUCKET, key, str(path)),
        )

    def of_arrow() -> tuple[Transfer, Transfer]:
        chunk = {"chunk_size": 64 * MIB}  # as Ray Train copies
        return (
            lambda path, key: fs.copy_files(
                str(path), f"{BUCKET}/{key}", destination_filesystem=arrow, use_threads=False, **chunk
            ),
            lambda path, key: fs.copy_files(f"{BUCKET}/{key}", str(path), source_filesystem=arrow, **chunk),
        )

    return {
        "ours": of_ours(),
        "s3fs as it comes": of_s3fs(),
        "pyarrow S3FileSystem": of_arrow(),
        "boto3 as it comes": of_boto(),
    }


def measure_transfers(repeats: int) -> list[str]:
    """Upload and download with each client in turn, and print the table."""
    targets = []
    for size in TRANSFER_SIZES:
        up: dict[str, list[float]] = {}
        down: dict[str, list[float]] = {}
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, MotoServer() as server:
            server.create_bucket(BUCKET)
            source, target = Path(folder, "source"), Path(folder, "target")
            source.write_bytes(os.urandom(size))
            clients = transfers(server.endpoint_url)
            names = list(clients)
            small = Path(folder, "small")
            small.write_bytes(b"small")
            for upload, _ in clients.values():
                upload(small, "small/small")  # connections and credentials are not what is measured
            clients["ours"][0](source, "first/source")  # nor is the memory that the server asks its machine for
            server.client().delete_object(Bucket=BUCKET, Key="first/source")
            for repeat in range(repeats):
                for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
                    upload, download = clients[name]
                    key = f"object-{len(up.get(name, []))}/target"
                    try:
                        seconds = _seconds(upload, source, key), _seconds(download, target, key)
                    except OSError as error:
                        if name == "ours":
                            raise
                        # pyarrow asks anew for the end of an upload that takes the server long, and finds it gone.
                        seconds = float("inf"), float("inf")
                        print(f"# {size // MIB} MiB {name} failed: {error}", flush=True)
                    up.setdefault(name, []).append(seconds[0])
                    down.setdefault(name, []).append(seconds[1])
                    target.unlink(missing_ok=True)
                    server.client().delete_object(Bucket=BUCKET, Key=key)
                    print(f"# {size // MIB} MiB {name}: {seconds[0]:.2f} s up, {seconds[1]:.2f} s down", flush=True)
        rows = [
            [name, *(summary([size / MIB / s for s in side[name]], digits=0) for side in (up, down))] for name in names
        ]
        print(f"\n{size // MIB} MiB, MB/s, median (min–max) of {repeats}:\n")
        print(markdown_table(["client", "upload", "download"], rows), "\n")
        for what, side in (("upload", up), ("download", down)):
            targets += [
                ratio_target(
                    f"{what} of {size // MIB} MiB [s], ours to {other}", side["ours"], side[other], limit=1 / 1.5
                )
                for other in ("s3fs as it comes", "pyarrow S3FileSystem")
            ]
    return targets


def _seconds(transfer: Transfer, path: Path, key: str) -> float:
    began = time.perf_counter()
    transfer(path, key)
    return time.perf_counter() - began


# ---------------------------------------------------------------------------------------- blocked time


def blocking_loop(config: dict[str, Any]) -> None:
    """Report checkpoints of each size in both modes, and write how long each report blocked."""
    import ray.train

    modes = {"sync": ray.train.CheckpointUploadMode.SYNC, "async": ray.train.CheckpointUploadMode.ASYNC}
    found: list[dict[str, Any]] = []
    sync = os.fsync
    for files, size in config["sizes"]:
        data = os.urandom(size)
        pause = 0.5
        for mode, synced in itertools.product(modes, config["synced"] * config["checkpoints"]):
            folder = tempfile.mkdtemp(dir="/dev/shm")
            for number in range(files):
                Path(folder, f"model-{number}").write_bytes(data)
            os.sync()  # what earlier checkpoints have left to be written
            os.fsync = sync if synced else lambda _: None
            began = time.perf_counter()
            ray.train.report(
                {"size": size},
                checkpoint=ray.train.Checkpoint.from_directory(folder),
                checkpoint_upload_mode=modes[mode],
                delete_local_checkpoint_after_upload=True,
            )
            blocked = time.perf_counter() - began
            found.append({"size": [files, size], "mode": mode, "synced": synced, "blocked": blocked})
            # In the background an upload shall end while the loop trains on.
            pause = max(pause, 1.5 * blocked)
            time.sleep(pause if mode == "async" else 0.1)
    Path(config["result"]).write_text(json.dumps(found))


def measure_blocked() -> list[str]:
    """Train with checkpoints on a store with latency, and print how long reports block."""
    from prefect_elastic_train import CheckpointPolicy, S3Storage, elastic_train

    targets = []
    with MotoServer() as server, FaultProxy(server.endpoint_url) as proxy, tempfile.TemporaryDirectory() as folder:
        server.create_bucket(BUCKET)
        proxy.latency(LATENCY_SECONDS)
        result = Path(folder, "blocked.json")
        settings = s3_settings(proxy.endpoint_url)
        elastic_train(
            "benchmarks.checkpoint:blocking_loop",
            train_loop_config={
                "sizes": [(1, size) for size in BLOCKED_SIZES],
                "checkpoints": BLOCKED_CHECKPOINTS,
                "synced": [True],
                "result": str(result),
            },
            framework="none",
            checkpoints=CheckpointPolicy(keep=1),
            storage=S3Storage(**{name: getattr(settings, name) for name in type(settings).model_fields}),
        )
        found = json.loads(result.read_text())
    rows = []
    for size in BLOCKED_SIZES:
        blocked = {
            mode: [line["blocked"] for line in found if (line["size"], line["mode"]) == ([1, size], mode)]
            for mode in ("sync", "async")
        }
        ratio = statistics.median(blocked["async"]) / statistics.median(blocked["sync"])
        rows.append([f"{size // MIB} MiB", summary(blocked["sync"], 3), summary(blocked["async"], 3), f"{ratio:.3f}"])
        if size >= 100 * MIB:
            targets.append(
                ratio_target(
                    f"blocked time of {size // MIB} MiB [s], async to sync",
                    blocked["async"],
                    blocked["sync"],
                    limit=0.05,
                )
            )
    print(f"\nBlocked time of a report in seconds, {LATENCY_SECONDS:g} s added to each request:\n")
    print(markdown_table(["checkpoint", "sync", "async", "async / sync"], rows), "\n")
    return targets


def measure_local() -> None:
    """Train with checkpoints on a disk, and print how long reports block, with and without syncs."""
    from prefect_elastic_train import CheckpointPolicy, LocalStorage, elastic_train

    with tempfile.TemporaryDirectory(dir=LOCAL_FOLDER) as folder:
        result = Path(folder, "local.json")
        elastic_train(
            "benchmarks.checkpoint:blocking_loop",
            train_loop_config={
                "sizes": LOCAL_CHECKPOINTS,
                "checkpoints": LOCAL_REPEATS,
                "synced": [True, False],
                "result": str(result),
            },
            framework="none",
            checkpoints=CheckpointPolicy(keep=1),
            storage=LocalStorage(path=f"{folder}/runs"),
        )
        found = json.loads(result.read_text())
    rows = []
    for files, size in LOCAL_CHECKPOINTS:
        cells = [
            summary(
                [
                    line["blocked"]
                    for line in found
                    if (line["size"], line["mode"], line["synced"]) == ([files, size], mode, synced)
                ],
                3,
            )
            for mode in ("sync", "async")
            for synced in (False, True)
        ]
        rows.append([f"{files * size / MIB:.0f} MiB" + (f" in {files} files" if files > 1 else ""), *cells])
    print(f"\nBlocked time of a report in seconds on {LOCAL_FOLDER}, median (min–max) of {LOCAL_REPEATS}:\n")
    header = ["checkpoint", "sync, no fsync", "sync", "async, no fsync", "async"]
    print(markdown_table(header, rows), "\n")


# ---------------------------------------------------------------------------------------------- memory


def upload_and_watch(endpoint_url: str, folder: str) -> None:
    """Upload a folder, in a process of its own, and print by how much its resident memory grew at most."""
    from prefect_elastic_train.runs import layout
    from prefect_elastic_train.runs.run_filesystem import run_filesystem
    from prefect_elastic_train.storage.opening import Storage

    settings = s3_settings(endpoint_url)
    store = Storage(settings).run("memory")
    store.create(layout.attempt_name(1), b"{}")
    handler = run_filesystem(store, 1).handler
    process = psutil.Process()
    peak = before = process.memory_info().rss
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.01):
            peak = max(peak, process.memory_info().rss)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    handler.upload_folder(folder, f"{store.path}/checkpoint")
    done.set()
    watcher.join()
    print(json.dumps({"grown": peak - before}))


def measure_memory() -> list[str]:
    """Upload 2 GiB as one file and as several, and print by how much the process grew."""
    targets = []
    for count in MEMORY_FILES:
        with MotoServer() as server, tempfile.TemporaryDirectory() as folder:
            server.create_bucket(BUCKET)
            for number in range(count):
                with Path(folder, f"shard-{number}").open("wb") as file:
                    for _ in range(MEMORY_BYTES // count // (64 * MIB)):
                        file.write(os.urandom(64 * MIB))
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.checkpoint", "--watch", server.endpoint_url, folder],
                check=True,
                stdout=subprocess.PIPE,
                text=True,
                timeout=900,
            )
        grown = json.loads(done.stdout.splitlines()[-1])["grown"]
        verdict = "PASS" if grown <= MEMORY_LIMIT else "FAIL"
        targets.append(
            f"- resident memory grows while {MEMORY_BYTES // MIB} MiB in {count} file(s) are uploaded: "
            f"{grown // MIB} MiB (<= {MEMORY_LIMIT // MIB}): {verdict}"
        )
    return targets


def main() -> int:
    """Measure and print the tables and the targets.

    Returns:
        0. A missed target is printed, not an error.
    """
    if sys.argv[1:2] == ["--watch"]:
        upload_and_watch(*sys.argv[2:])
        return 0
    arguments = parse_arguments(__doc__ or "", list(PARTS))
    load_before = os.getloadavg()[0]
    targets: list[str] = []
    if "transfer" in arguments.only:
        targets += measure_transfers(arguments.repeats)
    if "blocked" in arguments.only:
        targets += measure_blocked()
    if "memory" in arguments.only:
        targets += measure_memory()
    if "local" in arguments.only:
        measure_local()
    print(f"\n{machine_lines('benchmarks.checkpoint', load_before)}\n")
    print("Targets:")
    print("\n".join(targets))
    return 0


if __name__ == "__main__":
    sys.exit(main())
