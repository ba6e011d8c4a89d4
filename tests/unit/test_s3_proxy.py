"""The S3 server and the disturbing proxy of the tests do what the tests that use them rely on."""

from __future__ import annotations

import contextlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from botocore.exceptions import BotoCoreError, ClientError

from tests.support.processes import wait_for
from tests.support.s3 import FaultProxy, MotoServer, Which, _client


@pytest.fixture
def client(proxy: FaultProxy) -> Any:
    return _client(proxy.endpoint_url)


def test_a_large_object_passes_unchanged(client: Any, bucket: str) -> None:
    data = os.urandom(8 << 20)
    client.put_object(Bucket=bucket, Key="a b/größe+", Body=data)  # with `Expect: 100-continue`
    assert client.head_object(Bucket=bucket, Key="a b/größe+")["ContentLength"] == len(data)
    assert client.get_object(Bucket=bucket, Key="a b/größe+")["Body"].read() == data


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
