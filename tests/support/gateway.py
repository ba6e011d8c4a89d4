"""A gateway as companies put before a Ray dashboard: TLS with a certificate of their own, and a path prefix."""

from __future__ import annotations

import asyncio
import ssl
import threading
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from tests.support.certificates import make_certificate

_HOP_BY_HOP = {"connection", "content-encoding", "content-length", "host", "transfer-encoding"}


class Gateway:
    """Passes requests below a prefix on to a server, until it is closed.

    Args:
        upstream: URL of the server.
        folder: Where the certificate goes.
        prefix: The path prefix.

    Attributes:
        url: Where it answers.
        certificate: File that vouches for it.
    """

    def __init__(self, upstream: str, folder: Path, prefix: str = "/ray") -> None:
        self._upstream = upstream
        self._prefix = prefix
        self.certificate, self._pair = make_certificate(folder)
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True)
        self._thread.start()
        assert self._up.wait(20), "the gateway did not start"

    def __enter__(self) -> Gateway:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(20)

    async def _serve(self) -> None:
        self._end = asyncio.Event()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._pair)
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", self._prefix + "/{path:.*}", self._pass_on)
        runner = web.AppRunner(app, shutdown_timeout=1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
        await site.start()
        assert site._server is not None
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        self.url = f"https://127.0.0.1:{port}{self._prefix}"
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as self._session:
            self._up.set()
            await self._end.wait()
        await runner.cleanup()

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        url = f"{self._upstream}/{request.match_info['path']}"
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP}
        data: Any = await request.read()
        async with self._session.request(
            request.method, url, params=request.query, headers=headers, data=data
        ) as upstream:
            kept = {name: value for name, value in upstream.headers.items() if name.lower() not in _HOP_BY_HOP}
            answer = web.StreamResponse(status=upstream.status, headers=kept)
            await answer.prepare(request)
            async for piece in upstream.content.iter_any():
                await answer.write(piece)
            return answer
