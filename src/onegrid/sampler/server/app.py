"""The sampler protocol over HTTP: one address for each method, bytes as `sampler/wire.py` writes them.

    GET  /health                        without a token: whether it lives
    GET  /onegrid/v1/status             version, plan, capabilities, what bits depend on
    GET  /onegrid/v1/describe           JSON; cached_versions too
    POST /onegrid/v1/begin              JSON: the manifest
    POST /onegrid/v1/receive            frame: a bucket
    POST /onegrid/v1/commit             JSON: {"version": 3}
    POST /onegrid/v1/abort, accept, sleep, wake, adopt
    POST /onegrid/v1/digest, stored     JSON: names
    POST /onegrid/v1/generate, probe    JSON in, frame out
    POST /onegrid/v1/multiply           frame in and out

An error answers with {"error": {"type", "message", "condition", "tensors"}}; its type is the name of an OnegridError.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from onegrid.errors import CapabilityError, NonFiniteError, OnegridError, SyncError
from onegrid.recipe import Plan
from onegrid.sampler import wire
from onegrid.sampler.base import Sampler, engine_of
from onegrid.sampler.server.desk import Desk
from onegrid.sampler.server.lease import Lease
from onegrid.types import Manifest
from onegrid.types import Request as Sample

PROTOCOL = 1
PREFIX = "/onegrid/v1/"
CLIENT = "x-onegrid-client"
EXTRAS = ("multiply", "stored", "adopt", "cached_versions")
"""Methods that a sampler may have beside the protocol."""
JSON = "application/json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a client may ask for at most."""

    body_bytes: int = 256 << 20
    """Of one request; a bucket must fit."""
    update_seconds: float = 60.0
    """Silence of whoever updates the weights after which the update is undone."""


class Service:
    """A sampler with what the endpoints share. Endpoints of other protocols are added with `routes`.

    bits_within  what equal bits depend on here (device kind, instruction set, libraries), for a client to compare
    """

    def __init__(
        self,
        sampler: Sampler,
        *,
        plan_digest: str,
        token: str = "",
        limits: Limits | None = None,
        bits_within: Mapping[str, str] | None = None,
    ) -> None:
        self.sampler, self.plan_digest, self.token = sampler, plan_digest, token
        self.limits = limits or Limits()
        self.bits_within = dict(bits_within or {})
        self.desk = Desk(sampler)
        self.lease = Lease(self.limits.update_seconds)

    async def settle(self) -> None:
        """Undoes the update of a client that has gone away."""
        if self.lease.lapsed:
            self.lease.release()
            await self.desk.call(self.sampler.abort)

    async def status(self, request: Request) -> Response:
        """What a client must know before it asks for more."""
        found = {
            "protocol": PROTOCOL,
            "version": await self.desk.call(lambda: self.sampler.version),
            "plan_digest": self.plan_digest,
            "capabilities": wire.tree(self.sampler.capabilities),
            "bits_within": self.bits_within,
            "engine_version": engine_of(self.sampler),
            "can": [name for name in EXTRAS if hasattr(self.sampler, name)],
            "body_bytes": self.limits.body_bytes,
        }
        return JSONResponse(found)

    async def cached_versions(self, request: Request) -> Response:
        """Versions in the caches. Not part of the status, since an engine may have to run to find out."""
        return JSONResponse({"versions": sorted(await self.desk.call(self.extra("cached_versions")))})

    async def describe(self, request: Request) -> Response:
        """Every tensor as it is live."""
        return JSONResponse(wire.tree(await self.desk.call(self.sampler.describe)))

    async def begin(self, request: Request) -> Response:
        """Opens a transaction for one client."""
        manifest = wire.read(Manifest, await self.json(request), "manifest")
        self.lease.take(_client(request))
        try:
            with self.lease.at_work():
                await self.desk.call(lambda: self.sampler.begin(manifest))
        except BaseException:
            self.lease.release()
            raise
        self.lease.unaccepted = False
        return JSONResponse({})

    async def receive(self, request: Request) -> Response:
        """Stages a bucket; one that is cut on the way was never here."""
        self.lease.check(_client(request))
        bucket = wire.unpack_bucket(await self.frame(request))
        self.lease.check(_client(request))
        with self.lease.at_work():
            await self.desk.call(lambda: self.sampler.receive(bucket))
        return JSONResponse({})

    async def commit(self, request: Request) -> Response:
        """Makes the version live; others are served with it once its sender has accepted it."""
        version = _field(await self.json(request), "version", int)
        self.lease.check(_client(request))
        self.lease.unaccepted = True
        try:
            with self.lease.at_work():
                share = await self.desk.call(lambda: self.sampler.commit(version))
        except BaseException:
            self.lease.unaccepted = False
            raise
        return JSONResponse({"share": share})

    async def abort(self, request: Request) -> Response:
        """Undoes what this client has sent; nothing where another one is at it, or none."""
        if self.lease.holder == _client(request):
            await self.desk.call(self.sampler.abort)
            self.lease.release()
        return JSONResponse({})

    async def accept(self, request: Request) -> Response:
        """The client stands by what it has committed."""
        self.lease.accept(_client(request))
        return JSONResponse({})

    async def digest(self, request: Request) -> Response:
        """From the storage that the kernels read."""
        names = _names(await self.json(request))
        return JSONResponse({"digests": await self.desk.call(lambda: self.sampler.digest(names))})

    async def stored(self, request: Request) -> Response:
        """Bytes of one tensor by part."""
        name = _field(await self.json(request), "name", str)
        read = self.extra("stored")
        return Response(wire.pack({}, await self.desk.call(lambda: read(name))), media_type=wire.FRAME)

    async def generate(self, request: Request) -> Response:
        """Rollouts. A client that generates accepts what it has committed."""
        listed = _field(await self.json(request), "requests", list)
        wanted = [wire.read(Sample, item, f"requests[{i}]") for i, item in enumerate(listed)]
        client = _client(request)
        self.lease.refuse_others(client)
        self.lease.accept(client)
        rollouts = await self.desk.generate(wanted, allowed=lambda: self.lease.refuse_others(client))
        return Response(wire.pack_rollouts(rollouts), media_type=wire.FRAME)

    async def probe(self, request: Request) -> Response:
        """Log-probabilities of the token after each prompt, as their bytes."""
        asked = await self.json(request)
        prompts, captured = _field(asked, "prompts", list), _field(asked, "captured", bool)
        if not all(isinstance(p, list) and p and all(type(t) is int for t in p) for p in prompts):
            raise wire.WireError("prompts must be lists of token ids, none of them empty")
        answers = await self.desk.call(lambda: self.sampler.probe(prompts, captured=captured))
        frame = wire.pack({"num": len(answers)}, {str(i): x for i, x in enumerate(answers)})
        return Response(frame, media_type=wire.FRAME)

    async def multiply(self, request: Request) -> Response:
        """What the live kernel of one linear makes of an input."""
        meta, tensors = wire.unpack(await self.frame(request))
        key, function = _field(meta, "key", str), self.extra("multiply")
        if "x" not in tensors:
            raise wire.WireError("multiply takes a tensor x")
        device = next(iter(tensors.values())).device
        try:
            y = await self.desk.call(lambda: function(key, tensors["x"].to(_device_of(self.sampler, device))))
        except KeyError as error:
            raise wire.WireError(f"no linear {key!r} in this model") from error
        return Response(wire.pack({}, {"y": y}), media_type=wire.FRAME)

    async def adopt(self, request: Request) -> Response:
        """Goes over to another plan of the same model; nothing serves until the next synchronization."""
        text = _field(await self.json(request), "plan", str)
        plan = Plan.from_json(text)
        function = self.extra("adopt")
        self.lease.take(_client(request))
        try:
            with self.lease.at_work():
                await self.desk.call(lambda: function(plan))
        finally:
            self.lease.release()
        self.plan_digest = plan.digest
        return JSONResponse({})

    async def sleep(self, request: Request) -> Response:
        """Gives memory back."""
        return await self._exclusive(request, self.sampler.sleep)

    async def wake(self, request: Request) -> Response:
        """Serves again, after proof."""
        return await self._exclusive(request, self.sampler.wake)

    async def _exclusive(self, request: Request, function: Callable[[], None]) -> Response:
        if self.lease.holder not in (None, _client(request)):
            self.lease.take(_client(request))  # raises
        await self.desk.call(function)
        return JSONResponse({})

    def extra(self, name: str) -> Callable[..., Any]:
        """A method that not every sampler has. CapabilityError where this one has not."""
        function = getattr(self.sampler, name, None)
        if function is None:
            raise CapabilityError(f"this sampler has no {name}()")
        return function

    async def json(self, request: Request) -> dict[str, Any]:
        """The body as an object. WireError, or HTTPException 413 and 415."""
        raw = await self._body(request, JSON)
        try:
            found = json.loads(raw or b"{}")
        except (ValueError, RecursionError) as error:
            raise wire.WireError(f"the body is no JSON: {error}") from error
        if not isinstance(found, dict):
            raise wire.WireError(f"the body must be a JSON object, not {type(found).__name__}")
        return found

    async def frame(self, request: Request) -> bytes:
        """The body as bytes. HTTPException 413 and 415."""
        return await self._body(request, wire.FRAME)

    async def _body(self, request: Request, kind: str) -> bytes:
        if _kind(request) != kind:
            raise HTTPException(415, f"content-type must be {kind}")
        limit = self.limits.body_bytes
        told = request.headers.get("content-length", "0")
        if not told.isdigit() or int(told) > limit:
            raise HTTPException(413, f"the body has {told} bytes, allowed are {limit}; lower guard.bucket_bytes")
        chunks: list[bytes] = []
        total = 0
        async for chunk in request.stream():
            total += len(chunk)
            if total > limit:
                raise HTTPException(413, f"the body has more than {limit} bytes; lower guard.bucket_bytes")
            chunks.append(chunk)
            self.lease.renew(_client(request))  # slow is not silent
        return b"".join(chunks)

    def routes(self) -> list[Route]:
        """Addresses of the sampler protocol."""
        asked = (self.status, self.describe, self.cached_versions)
        told = [self.begin, self.receive, self.commit, self.abort, self.accept, self.digest, self.stored, self.generate]
        told += [self.probe, self.multiply, self.adopt, self.sleep, self.wake]
        found = [Route("/health", _health, methods=["GET"])]
        found += [Route(PREFIX + e.__name__, self._guarded(e), methods=["GET"]) for e in asked]
        return found + [Route(PREFIX + e.__name__, self._guarded(e), methods=["POST"]) for e in told]

    def _guarded(self, endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            # A page in a browser cannot send these kinds elsewhere without asking first, which nobody grants here.
            if request.method == "POST" and _kind(request) not in (JSON, wire.FRAME):
                raise HTTPException(415, f"content-type must be {JSON} or {wire.FRAME}")
            try:
                await self.settle()
                self.lease.renew(_client(request))
                return await endpoint(request)
            except OnegridError as error:
                return refusal(error)
            except ClientDisconnect:
                return Response(status_code=499)  # nobody reads it

        return answer


def make_app(service: Service, *, more: list[Route] | None = None, hosts: list[str] | None = None) -> ASGIApp:
    """The application of a service.

    more   addresses beside those of the sampler protocol
    hosts  names under which it may be reached; None for any. A tokenless server on loopback needs them, against
           pages that make a browser resolve their own name to 127.0.0.1
    """

    @asynccontextmanager
    async def lifespan(app: Starlette):
        yield
        service.desk.close()

    middleware = [] if hosts is None else [Middleware(TrustedHostMiddleware, allowed_hosts=hosts)]
    middleware.append(Middleware(_Authentication, token=service.token))
    handlers: dict[Any, Any] = {HTTPException: _http_error, Exception: _internal_error}
    return Starlette(
        routes=service.routes() + (more or []),
        middleware=middleware,
        exception_handlers=handlers,
        lifespan=lifespan,
    )


def refusal(error: OnegridError) -> Response:
    """An error of ours as its sender can raise it again."""
    told: dict[str, Any] = {"type": _public_type(error), "message": str(error)}
    if isinstance(error, SyncError):
        told |= {"condition": error.condition, "tensors": list(error.tensors)}
    status = 409 if isinstance(error, SyncError) else 500 if isinstance(error, NonFiniteError) else 400
    return JSONResponse({"error": told}, status_code=status)


class _Authentication:
    """Refuses every request but /health that does not carry the token, before anything of it is read."""

    def __init__(self, app: ASGIApp, *, token: str) -> None:
        self.app, self.token = app, token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self.token and scope["path"] != "/health":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, b"Bearer " + self.token):
                told = {"type": "Unauthorized", "message": "a token is needed: Authorization: Bearer TOKEN"}
                headers = {"www-authenticate": "Bearer", "connection": "close"}
                response = JSONResponse({"error": told}, status_code=401, headers=headers)
                await response(scope, receive, send)
                return
        await self.app(scope, receive, send)


async def _health(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    told = {"type": "CapabilityError", "message": error.detail}
    return JSONResponse({"error": told}, status_code=error.status_code, headers={"connection": "close"})


async def _internal_error(request: Request, error: Exception) -> Response:
    """A fault of ours: its traceback is in the server's log, what serves is as it was."""
    told = {"type": "", "message": f"the server failed: {type(error).__name__}: {error}; its log has the traceback"}
    return JSONResponse({"error": told}, status_code=500, headers={"connection": "close"})


def _public_type(error: OnegridError) -> str:
    names = [cls.__name__ for cls in type(error).__mro__ if cls.__module__ == "onegrid.errors"]
    return names[0] if names else "OnegridError"


def _kind(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip()


def _client(request: Request) -> str:
    return request.headers.get(CLIENT, "")


def _field(tree: Mapping[str, Any], name: str, kind: type) -> Any:
    value = tree.get(name)
    if type(value) is not kind:
        raise wire.WireError(f"{name} must be {kind.__name__}, not {str(value)[:60]!r}")
    return value


def _names(tree: Mapping[str, Any]) -> list[str]:
    names = _field(tree, "names", list)
    if not all(isinstance(name, str) for name in names):
        raise wire.WireError("names must be strings")
    return names


def _device_of(sampler: Sampler, default: Any) -> Any:
    weights = getattr(sampler, "weights", None)
    return default if weights is None else weights.device
