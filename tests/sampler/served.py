"""A served sampler on a real socket, in a thread of the test."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import httpx
import uvicorn

from onegrid.sampler.base import Sampler
from onegrid.sampler.remote import RemoteConfig, RemoteSampler
from onegrid.sampler.server.app import Limits, Service, make_app
from onegrid.sampler.server.lease import Lease
from onegrid.sampler.server.openai import Model, OpenAI
from tests.patience import PATIENCE_S

BITS = {"device": "cpu", "torch": "the same"}
get, post = (partial(call, timeout=PATIENCE_S) for call in (httpx.get, httpx.post))


@contextlib.contextmanager
def serving(
    sampler: Sampler,
    plan_digest: str,
    *,
    token: str = "",
    limits: Limits | None = None,
    model: Model | None = None,
    hosts: list[str] | None = None,
    port: int = 0,
    clock: Callable[[], float] | None = None,
) -> Iterator[str]:
    """The URL of a server that runs until the block ends. clock: what its lease goes by."""
    service = Service(sampler, plan_digest=plan_digest, token=token, limits=limits, bits_within=BITS)
    if clock is not None:
        service.lease = Lease(service.limits.update_seconds, clock)
    more = OpenAI(service, model).routes() if model else []
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind(("127.0.0.1", port))
    app = make_app(service, more=more, hosts=hosts)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="on", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + PATIENCE_S
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.started
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
        listening.close()
        assert not thread.is_alive()


@contextlib.contextmanager
def connected(url: str, plan_digest: str, *, token_file: str = "") -> Iterator[RemoteSampler]:
    """A client of it, closed at the end without standing by anything."""
    config = RemoteConfig(url=url, token_file=token_file, timeout_seconds=PATIENCE_S)
    remote = RemoteSampler(config, plan_digest=plan_digest, bits_within=BITS)
    try:
        yield remote
    finally:
        remote._client.close()
