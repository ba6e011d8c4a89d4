"""The S3 server and the disturbing proxy of the tests do what the tests that use them rely on."""

from __future__ import annotations

import contextlib
import http.client
import io
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
from botocore.exceptions import BotoCoreError, ClientError, ConnectionClosedError, ReadTimeoutError

from tests.support.processes import wait_for
from tests.support.s3 import WRITES, FaultProxy, MotoServer, Which


@pytest.fixture
def client(proxy: FaultProxy) -> Any:
    return proxy.client()


@contextlib.contextmanager
def _refused(status: int, code: str) -> Iterator[None]:
    with pytest.raises(ClientError) as caught:
        yield
    answer = caught.value.response
    assert (answer["ResponseMetadata"]["HTTPStatusCode"], answer["Error"]["Code"]) == (status, code)


def test_a_large_object_passes_unchanged_and_is_not_held(proxy: FaultProxy, client: Any, bucket: str) -> None:
    data, started = os.urandom(64 << 20), time.monotonic()
    client.put_object(Bucket=bucket, Key="large", Body=data)  # with `Expect: 100-continue`
    assert client.get_object(Bucket=bucket, Key="large")["Body"].read() == data
    assert time.monotonic() - started < 10
    assert psutil.Process(proxy.pid).memory_info().rss < 64 << 20


def test_a_connection_serves_many_requests(proxy: FaultProxy, server: MotoServer, bucket: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=10)
    for number in range(3):
        connection.request("PUT", f"/{bucket}/{number}", iter([b"ab", b"c"]), encode_chunked=True)
        answer = connection.getresponse()
        assert (answer.status, answer.read(), answer.will_close) == (200, b"", False)
    proxy.refuse("AccessDenied")
    connection.request("PUT", f"/{bucket}/refused", b"body")
    assert b"AccessDenied" in connection.getresponse().read()
    assert connection.sock is not None, "kept through a refusal"
    connection.close()
    assert server.keys(bucket) == ["0", "1", "2"]
    assert server.client().get_object(Bucket=bucket, Key="1")["Body"].read() == b"abc"


def test_one_of_several_exclusive_writers_wins(client: Any, server: MotoServer, bucket: str) -> None:
    whole, together = {"Bucket": bucket, "Key": "whole"}, threading.Barrier(4)

    def write(_: int) -> int:
        upload = {**whole, "UploadId": client.create_multipart_upload(**whole)["UploadId"]}
        part = client.upload_part(**upload, PartNumber=1, Body=os.urandom(8 << 20))
        parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
        together.wait(10)
        try:
            client.complete_multipart_upload(**upload, MultipartUpload=parts, IfNoneMatch="*")
        except ClientError as error:
            return int(error.response["ResponseMetadata"]["HTTPStatusCode"])
        return 200

    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(write, range(4))) == [200, 412, 412, 412]
    assert len(server.incomplete_uploads(bucket)) == 3
    for call, condition in (
        (client.put_object, {"IfNoneMatch": "*"}),
        (client.put_object, {"IfMatch": '"other"'}),
        (client.delete_object, {"IfMatch": '"other"'}),
    ):
        with _refused(412, "PreconditionFailed"):
            call(**whole, **condition)


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


def test_resets_come_before_and_after_the_server_acts(
    proxy: FaultProxy, client: Any, server: MotoServer, bucket: str
) -> None:
    proxy.faults(rate=1, kinds=["reset"])
    for number in range(40):
        with pytest.raises(BotoCoreError):
            client.put_object(Bucket=bucket, Key=f"{number}", Body=b"x" * 10_000)
    given = proxy.faults_given
    assert given["reset_before"] + given["reset_after"] == 40
    assert 10 <= given["reset_after"] == len(server.keys(bucket)) <= 30


def test_a_share_of_the_requests_is_disturbed_as_the_seed_says(proxy: FaultProxy, client: Any, bucket: str) -> None:
    found = []
    for _ in range(2):
        proxy.reset_counters()
        proxy.faults(0.25, stall_seconds=0.01, seed=7, when=Which(("HEAD",)))
        for _ in range(80):
            with contextlib.suppress(BotoCoreError, ClientError):
                client.head_bucket(Bucket=bucket)
        found.append([seen.fault for seen in proxy.requests])
    assert found[0] == found[1]
    assert set(found[0]) == {"", "503", "stall", "reset_before", "reset_after"}
    assert 10 <= sum(proxy.faults_given.values()) <= 30


def test_throttling_stalls_and_latency(proxy: FaultProxy, client: Any, server: MotoServer, bucket: str) -> None:
    proxy.faults(rate=1, kinds=["503"])
    with _refused(503, "SlowDown"):
        client.put_object(Bucket=bucket, Key="slow", Body=io.BytesIO(b"x"))
    proxy.faults(rate=1, kinds=["stall"], stall_seconds=3)
    with pytest.raises(ReadTimeoutError):
        proxy.client(read_timeout=0.2).put_object(Bucket=bucket, Key="late", Body=b"x")
    assert server.keys(bucket) == [], "nothing is there when the client gives up"
    wait_for(lambda: server.keys(bucket) == ["late"], 5, "the stalled request to be carried out")
    proxy.faults(None)
    proxy.latency(0.3)
    started = time.monotonic()
    client.head_bucket(Bucket=bucket)
    assert 0.3 <= time.monotonic() - started < 5


@pytest.mark.parametrize("how", ["reset", "refuse"])
def test_nothing_passes_in_an_outage_and_all_does_after_it(
    proxy: FaultProxy, client: Any, bucket: str, how: str
) -> None:
    proxy.faults(rate=1, kinds=["stall"], stall_seconds=60, when=Which(("DELETE",)))
    with ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(client.delete_object, Bucket=bucket, Key="any")
        wait_for(lambda: proxy.count("DELETE"), 5, "the request to come")
        client.head_bucket(Bucket=bucket)  # leaves a second connection
        with proxy.outage(how):
            assert isinstance(under_way.exception(5), BotoCoreError)
            for _ in range(3):
                with pytest.raises(BotoCoreError):
                    client.head_bucket(Bucket=bucket)
    client.head_bucket(Bucket=bucket)


def test_requests_are_refused_by_method_and_key(
    proxy: FaultProxy, client: Any, server: MotoServer, bucket: str
) -> None:
    run = {"Bucket": bucket, "Key": "runs/a"}
    client.put_object(**run, Body=b"x")
    proxy.refuse("AccessDenied", when=Which(WRITES, key_prefix="runs/"))
    for write in (client.put_object, client.delete_object, client.create_multipart_upload):
        with _refused(403, "AccessDenied"):
            write(**run)
    client.put_object(Bucket=bucket, Key="other")
    assert client.get_object(**run)["Body"].read() == b"x"
    proxy.refuse("NoSuchBucket", status=404, when=Which(contains="other"))
    with _refused(404, "404"):
        client.head_object(Bucket=bucket, Key="other")
    assert proxy.count("PUT", "runs/") == 2
    proxy.calm()
    client.delete_object(**run)
    assert server.keys(bucket) == ["other"]


def test_only_allowed_keys_and_tokens_get_in(proxy: FaultProxy, bucket: str) -> None:
    old, new = "AKIA" + "O" * 16, "AKIA" + "N" * 16
    proxy.allow_keys({new})
    with _refused(403, "InvalidAccessKeyId"):
        proxy.client(access_key=old).list_objects_v2(Bucket=bucket)
    proxy.allow_tokens({"second"})
    with _refused(400, "ExpiredToken"):
        proxy.client(access_key=new, token="first").list_objects_v2(Bucket=bucket)
    proxy.client(access_key=new, token="second").list_objects_v2(Bucket=bucket)
    assert [seen.access_key for seen in proxy.requests] == [old, new, new]
    proxy.allow_keys(None)
    proxy.allow_tokens(None)
    proxy.client(access_key=old).list_objects_v2(Bucket=bucket)
