"""The S3 server and the disturbing proxy of the tests do what the tests that use them rely on."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from botocore.exceptions import BotoCoreError, ClientError, ConnectionClosedError

from tests.support.processes import wait_for
from tests.support.s3 import WRITES, FaultProxy, MotoServer, Which, _client


@pytest.fixture
def client(proxy: FaultProxy) -> Any:
    return _client(proxy.endpoint_url)


@contextlib.contextmanager
def _refused(status: int, code: str) -> Iterator[None]:
    with pytest.raises(ClientError) as caught:
        yield
    answer = caught.value.response
    assert (answer["ResponseMetadata"]["HTTPStatusCode"], answer["Error"]["Code"]) == (status, code)


def test_a_large_object_passes_unchanged(client: Any, bucket: str) -> None:
    data = os.urandom(8 << 20)
    client.put_object(Bucket=bucket, Key="a b/größe+", Body=data)  # with `Expect: 100-continue`
    assert client.head_object(Bucket=bucket, Key="a b/größe+")["ContentLength"] == len(data)
    assert client.get_object(Bucket=bucket, Key="a b/größe+")["Body"].read() == data


def test_one_of_several_exclusive_writers_wins(client: Any, bucket: str) -> None:
    together = threading.Barrier(4)

    def write(_: int) -> int:
        together.wait(10)
        try:
            client.put_object(Bucket=bucket, Key="whole", Body=os.urandom(1 << 20), IfNoneMatch="*")
        except ClientError as error:
            return int(error.response["ResponseMetadata"]["HTTPStatusCode"])
        return 200

    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(write, range(4))) == [200, 412, 412, 412]


def test_a_lost_answer_was_carried_out(proxy: FaultProxy, client: Any, server: MotoServer, bucket: str) -> None:
    record = {"Bucket": bucket, "Key": "record", "Body": b"mine", "IfNoneMatch": "*"}
    proxy.lose_answer_of("PUT", "record")
    client.put_object(Bucket=bucket, Key="another")
    with pytest.raises(ConnectionClosedError):
        client.put_object(**record)
    assert server.keys(bucket) == ["another", "record"]
    with _refused(412, "PreconditionFailed"):
        client.put_object(**record)
    assert proxy.faults_given == {"lost_answer": 1}


def test_a_share_of_the_requests_is_disturbed_as_the_seed_says(
    proxy: FaultProxy, client: Any, server: MotoServer, bucket: str
) -> None:
    found = []
    for repeat in range(2):
        proxy.reset_counters()
        proxy.faults(0.4, stall_seconds=0.01, seed=7, when=Which(("PUT",)))
        for number in range(40):
            with contextlib.suppress(BotoCoreError, ClientError):
                client.put_object(Bucket=bucket, Key=f"{repeat}/{number}", Body=b"x")
        found.append([seen.fault for seen in proxy.requests])
        written = sum(fault not in ("503", "reset_before") for fault in found[-1])
        assert written == len(server.keys(bucket, f"{repeat}/"))
    assert found[0] == found[1]
    assert set(found[0]) == {"", "503", "stall", "reset_before", "reset_after"}
    assert 8 <= sum(proxy.faults_given.values()) <= 24


def test_requests_are_held_back_and_none_passes_in_an_outage(proxy: FaultProxy, client: Any, bucket: str) -> None:
    proxy.latency(0.2)
    started = time.monotonic()
    client.head_bucket(Bucket=bucket)
    assert 0.2 <= time.monotonic() - started < 5
    proxy.latency(2)
    with ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(client.delete_object, Bucket=bucket, Key="any")
        wait_for(lambda: len(proxy.requests) == 2, 5, "the request to come")
        proxy.latency(0)
        with proxy.outage():
            assert isinstance(under_way.exception(5), BotoCoreError)
            for _ in range(3):
                with pytest.raises(BotoCoreError):
                    client.head_bucket(Bucket=bucket)
    client.head_bucket(Bucket=bucket)


def test_requests_are_refused_by_what_they_are_and_whose(
    proxy: FaultProxy, client: Any, server: MotoServer, bucket: str
) -> None:
    proxy.refuse("AccessDenied", when=Which(WRITES, contains="runs/"))
    for write in (client.put_object, client.delete_object):
        with _refused(403, "AccessDenied"):
            write(Bucket=bucket, Key="runs/a")
    client.put_object(Bucket=bucket, Key="other")
    proxy.refuse("NoSuchBucket", status=404, when=Which(contains="other"))
    with _refused(404, "NoSuchBucket"):
        client.get_object(Bucket=bucket, Key="other")
    proxy.calm()
    assert server.keys(bucket) == ["other"]
    proxy.allow_tokens({"another"})
    with _refused(400, "ExpiredToken"):
        client.get_object(Bucket=bucket, Key="other")
    proxy.allow_keys({"another"})
    with _refused(403, "InvalidAccessKeyId"):
        client.get_object(Bucket=bucket, Key="other")
    assert proxy.faults_given == {"refused": 5}
