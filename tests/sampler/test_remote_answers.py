"""What a server that is none of ours, or broken, may answer: each is an error of ours that says what was wrong."""

from __future__ import annotations

import httpx
import pytest

from onegrid.errors import OnegridError
from onegrid.sampler.remote import RemoteConfig, RemoteSampler

CAN = {"bits": True, "kept_set": True, "routing": True, "stop_strings": True, "captured": False, "formats": None}
STATUS = {"protocol": 1, "version": 0, "plan_digest": "p", "capabilities": CAN, "bits_within": {},
          "can": ["cached_versions"], "engine_version": "e"}  # fmt: skip


@pytest.fixture
def meet(monkeypatch):
    """A remote sampler whose server gives these answers."""
    client = httpx.Client

    def made(status, answer=None):
        def handle(request):
            return httpx.Response(200, json=status) if request.url.path.endswith("status") else answer

        monkeypatch.setattr(httpx, "Client", lambda **k: client(transport=httpx.MockTransport(handle), **k))
        return RemoteSampler(RemoteConfig(url="http://there"), plan_digest="p", bits_within={})

    return made


@pytest.mark.parametrize("name", ["protocol", "plan_digest", "capabilities", "bits_within", "can"])
@pytest.mark.parametrize("value", [None, 7])
def test_a_status_that_is_not_whole_is_refused_at_the_start(meet, name, value):
    with pytest.raises(OnegridError, match=name.split("_")[0]):
        meet(STATUS | {name: value})


@pytest.mark.parametrize("version", [1.7, True, "1", [1]])
def test_a_version_is_an_integer(meet, version):
    with pytest.raises(OnegridError, match="'version' in the sampler's answer must be int"):
        _ = meet(STATUS | {"version": version}).version
    assert meet(STATUS | {"version": None}).version is None


def test_the_engine_there_is_known_by_its_own_name(meet):
    assert meet(STATUS).engine_version == "e"
    assert meet({k: v for k, v in STATUS.items() if k != "engine_version"}).engine_version == "unknown"


@pytest.mark.parametrize("body", ['{"share": NaN}', '{"share": 7}', '{"share": "x"}', '{"share": true}', "[]"])
def test_a_share_that_is_none_is_refused(meet, body):
    with pytest.raises(OnegridError):
        meet(STATUS, httpx.Response(200, content=body)).commit(1)


@pytest.mark.parametrize("versions", [[1.7], ["1"], [True], 3, None])
def test_versions_of_caches_there_are_integers(meet, versions):
    with pytest.raises(OnegridError, match="versions"):
        meet(STATUS, httpx.Response(200, json={"versions": versions})).cached_versions()


def test_an_error_of_another_shape_is_still_an_error(meet):
    told = {"type": "SyncError", "message": "m", "condition": 7, "tensors": 3}
    with pytest.raises(OnegridError, match="refused digest"):
        meet(STATUS, httpx.Response(409, json={"error": told})).digest(["a"])
