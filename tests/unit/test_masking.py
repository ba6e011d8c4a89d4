"""Credentials in the texts that people get to see."""

from __future__ import annotations

import pytest

from prefect_elastic_train.core.settings import without_credentials


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://AKIA:se/cr@et+/x@bucket/runs", "s3://***@bucket/runs"),
        ("https://token@host/a", "https://***@host/a"),
        ("AKIA:se/cr@et@bucket", "***@bucket"),
        ("ftp:/ada:sesame@host", "ftp:/***@host"),
        ("got 'sftp://ada:s'me@host' twice", "got 'sftp://***@host' twice"),
        ("http://a:b@c is away, ask http://d:e@f", "http://***@c is away, ask http://***@f"),
        ('{"url": "https://a:b/c@d", "n": 1}', '{"url": "https://***@d", "n": 1}'),
        *(
            (text, text)
            for text in ("gs://bucket/runs", "http://host:8265/api", "error: ask ada@example.com", "a@b", "")
        ),
    ],
)
def test_user_and_password_are_left_out_and_nothing_else(text: str, shown: str) -> None:
    assert without_credentials(text) == shown
