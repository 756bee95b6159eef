"""A sampler on another host: the protocol of `base.Sampler` spoken to `onegrid serve`.

Log-probabilities, digests and probes come as bytes and numbers of the engine there, so every check of a
synchronization sees what it would see in one process. Whether bits are promised depends on both ends: they are, where
the engine promises them and what bits depend on (device kind, instruction set, libraries) is the same here and there.
"""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from onegrid import errors
from onegrid.errors import CapabilityError, ConfigError, OnegridError, SyncError
from onegrid.recipe import Plan
from onegrid.sampler import wire
from onegrid.sampler.base import Capabilities, Live
from onegrid.types import Bucket, Manifest, Request, Rollout

PROTOCOL = 1
PREFIX = "/onegrid/v1/"


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteConfig:
    """Where the sampler is."""

    url: str = ""
    """Such as "http://127.0.0.1:8000"; behind a proxy that speaks TLS, "https://..."."""
    token_file: str = ""
    """File that holds the server's token, alone on a line; empty for a server on this host that has none."""
    timeout_seconds: float = 600.0
    """For one answer, a whole batch of completions included."""

    def __post_init__(self) -> None:
        if self.url and not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"url is {self.url!r}; it must begin with http:// or https://")
        if not 0 < self.timeout_seconds < float("inf"):
            raise ConfigError(f"timeout_seconds is {self.timeout_seconds}; it must be above 0 and finite")


def read_token(path: str) -> str:
    """The token that a file holds; "" without a file. Raises ConfigError for one that cannot be read or is empty."""
    if not path:
        return ""
    try:
        token = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the token file {path}: {error}") from error
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(f"{path} must hold one token of printable ASCII without spaces")
    return token


class RemoteSampler:
    """Follows `base.Sampler`.

    plan_digest  of the learner's plan; a server that runs another one is refused
    bits_within  what equal bits depend on here; see `server.app.Service`
    Raises ConfigError without a url or the library httpx (extra `serve`), SyncError where nobody answers or another
    plan is served.
    """

    def __init__(self, config: RemoteConfig, *, plan_digest: str, bits_within: Mapping[str, str]) -> None:
        try:
            import httpx
        except ImportError as error:
            raise ConfigError(f'a remote sampler needs httpx: pip install "onegrid[serve]" ({error})') from error
        if not config.url:
            raise ConfigError('sampler.engine is "remote", but sampler.remote.url is empty; give the server\'s address')
        self.url, self.plan_digest = config.url, plan_digest
        headers = {"x-onegrid-client": secrets.token_hex(16)}
        token = read_token(config.token_file)
        if token:
            headers["authorization"] = f"Bearer {token}"
        timeout = httpx.Timeout(config.timeout_seconds, connect=10.0)
        self._httpx = httpx
        self._client = httpx.Client(base_url=config.url, headers=headers, timeout=timeout, trust_env=False)
        try:
            self.capabilities = self._meet(bits_within)
        except BaseException:
            self._client.close()
            raise

    def _meet(self, bits_within: Mapping[str, str]) -> Capabilities:
        """What the sampler there can do, as far as this end can use it."""
        status = self._status()
        extras: dict[str, Callable[..., Any]] = {
            "multiply": self._multiply,
            "stored": self._stored,
            "adopt": self._adopt,
            "cached_versions": self._cached_versions,
        }
        for name in extras.keys() & set(_told(status, "can", list)):  # checks look for what a sampler can do besides
            setattr(self, name, extras[name])
        self.engine_version = str(status.get("engine_version", "unknown"))
        found = wire.read(Capabilities, _told(status, "capabilities", dict), "capabilities")
        there = _told(status, "bits_within", dict)
        here, keys = bits_within, sorted(set(there) | set(bits_within))
        other = [f"{k}: {there.get(k)} there, {here.get(k)} here" for k in keys if there.get(k) != here.get(k)]
        if found.bits and other:
            warnings.warn(
                f"the engine at {self.url} promises bits, but not those of this learner ({'; '.join(other)}): "
                "mismatch will be measured, not zero",
                stacklevel=3,
            )
        fields = {name: getattr(found, name) for name in Capabilities.__slots__}
        return Capabilities(**fields | {"bits": found.bits and not other})

    @property
    def version(self) -> int | None:
        """Version that serves."""
        status = self._status()
        return None if status.get("version", 0) is None else _told(status, "version", int)

    def describe(self) -> dict[str, Live]:
        """Every canonical tensor, from live storage there."""
        answer = self._get("describe")
        return {name: wire.read(Live, live, name) for name, live in answer.items()}

    def generate(
        self, requests: Sequence[Request], on_finished: Callable[[Rollout], None] | None = None
    ) -> list[Rollout]:
        """One rollout per request, in their order, all of them in one answer. Stands by what was committed last."""
        data = self._post("generate", {"requests": [wire.tree(r) for r in requests]}).content
        rollouts = wire.unpack_rollouts(data, requests)
        for rollout in rollouts if on_finished is not None else ():
            on_finished(rollout)  # type: ignore[misc]
        return rollouts

    def begin(self, manifest: Manifest) -> None:
        """Opens a transaction. SyncError C5 while another client has one."""
        self._post("begin", wire.tree(manifest))

    def receive(self, bucket: Bucket) -> None:
        """Sends one bucket."""
        self._post("receive", wire.pack_bucket(bucket))

    def commit(self, version: int) -> float | None:
        """Makes the staged version live there."""
        answer = self._json(self._post("commit", {"version": version}))
        share = None if answer.get("share") is None else float(_told(answer, "share", float, int))
        if share is not None and not 0 <= share <= 1:
            raise wire.WireError(f"the share that a commit moved is {share}; it must be within 0 and 1")
        return share

    def abort(self) -> None:
        """Drops what this client has sent."""
        self._post("abort", {})

    def accept(self) -> None:
        """Stands by the version that was committed last, so that others are served with it; `generate` does so too."""
        self._post("accept", {})

    def digest(self, names: Iterable[str]) -> dict[str, int]:
        """Digests from the storage that the kernels there read."""
        answer = self._json(self._post("digest", {"names": list(names)})).get("digests")
        if not isinstance(answer, dict) or not all(type(x) is int for x in answer.values()):
            raise wire.WireError(f"the digests of {self.url} are no numbers by name: {answer!r:.80}")
        return answer

    def probe(self, prompts: Sequence[Sequence[int]], captured: bool = False) -> list[Tensor]:
        """FP32 [V] log-probabilities, at temperature 1, of the token after each prompt."""
        body = {"prompts": [list(p) for p in prompts], "captured": captured}
        meta, tensors = wire.unpack(self._post("probe", body).content)
        try:
            return [tensors[str(i)] for i in range(int(meta["num"]))]
        except (KeyError, TypeError, ValueError) as error:
            raise wire.WireError(f"the answers of {self.url} to a probe are not whole: {error!r}") from error

    def sleep(self) -> None:
        """Gives memory back there."""
        self._post("sleep", {})

    def wake(self) -> None:
        """Serves again, after proof there."""
        self._post("wake", {})

    def _multiply(self, key: str, x: Tensor) -> Tensor:
        """What the live kernel of one linear makes of `x`, on the device of `x`."""
        _, tensors = wire.unpack(self._post("multiply", wire.pack({"key": key}, {"x": x})).content)
        if "y" not in tensors:
            raise wire.WireError(f"the product from {self.url} is missing")
        return tensors["y"].to(x.device)

    def _stored(self, name: str) -> dict[str, Tensor]:
        """Bytes by part of the version that came last."""
        return wire.unpack(self._post("stored", {"name": name}).content)[1]

    def _cached_versions(self) -> set[int]:
        """Versions of the weights that made what is cached there."""
        versions = _told(self._get("cached_versions"), "versions", list)
        if not all(type(v) is int for v in versions):
            raise wire.WireError(f"the versions cached at {self.url} are no integers: {versions!r:.80}")
        return set(versions)

    def _adopt(self, plan: Plan) -> None:
        """Goes over to another plan; nothing serves until the next commit."""
        self._post("adopt", {"plan": plan.to_json()})
        self.plan_digest = plan.digest

    def close(self) -> None:
        """Hangs up. A version that was neither accepted nor generated with is undone there after a while."""
        self._client.close()

    def _status(self) -> dict[str, Any]:
        status = self._get("status")
        if status.get("protocol") != PROTOCOL:
            raise SyncError(f"{self.url} speaks protocol {status.get('protocol')!r}, not {PROTOCOL}", condition="C5")
        if status.get("plan_digest") != self.plan_digest:
            raise SyncError(
                f"{self.url} serves plan {status.get('plan_digest')}, the learner runs {self.plan_digest}; "
                "start both with one recipe",
                condition="C1",
            )
        return status

    def _get(self, name: str) -> dict[str, Any]:
        return self._json(self._send("GET", name))

    def _post(self, name: str, body: Mapping[str, Any] | bytes) -> Any:
        if isinstance(body, bytes):
            return self._send("POST", name, content=body, headers={"content-type": wire.FRAME})
        return self._send("POST", name, json=body)

    def _send(self, method: str, name: str, **body: Any) -> Any:
        try:
            answer = self._client.request(method, PREFIX + name, **body)
        except self._httpx.HTTPError as error:
            raise SyncError(
                f"no answer from the sampler at {self.url} to {name}: {type(error).__name__}: {error}", condition="C5"
            ) from error
        if answer.status_code != 200:
            raise _refused(self.url, name, answer)
        return answer

    def _json(self, answer: Any) -> dict[str, Any]:
        try:
            found = answer.json()
        except ValueError as error:
            raise wire.WireError(f"the answer of {self.url} is no JSON: {error}") from error
        if not isinstance(found, dict):
            raise wire.WireError(f"the answer of {self.url} must be an object, not {found!r:.80}")
        return found


def _told(answer: Mapping[str, Any], name: str, *kinds: type) -> Any:
    """A field of an answer. WireError where it is missing or of another kind."""
    value = answer.get(name)
    if type(value) not in kinds:
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise wire.WireError(f"{name!r} in the sampler's answer must be {wanted}, not {value!r:.60}")
    return value


def _refused(url: str, name: str, answer: Any) -> OnegridError:
    """The error that the server raised, with its own type where it is one of ours."""
    try:
        told = answer.json()["error"]
        kind, message = str(told["type"]), str(told["message"])
    except (ValueError, KeyError, TypeError):
        kind, message, told = "", answer.text[:200], {}
    message = f"{url} refused {name} ({answer.status_code}): {message}"
    if kind == "SyncError":
        tensors = told.get("tensors")
        names = tuple(map(str, tensors)) if isinstance(tensors, list) else ()
        return SyncError(message, condition=str(told.get("condition", "C5")), tensors=names)
    if kind in ("", "Unauthorized") or answer.status_code in (413, 415):
        return SyncError(message, condition="C5")
    found = getattr(errors, kind, CapabilityError)
    known = isinstance(found, type) and issubclass(found, OnegridError) and found is not SyncError
    return found(message) if known else CapabilityError(message)
