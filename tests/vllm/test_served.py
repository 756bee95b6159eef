"""vLLM behind HTTP: a synchronization through a real socket, proved from the engine's storage, and tokens of it."""

from __future__ import annotations

import pytest

from onegrid.errors import SyncError
from onegrid.sync import push
from tests.bytes import assert_same_bytes
from tests.sampler.served import connected, serving
from tests.sampler.tiny import requests_of

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own


def test_a_served_vllm_takes_versions_and_gives_the_tokens_of_the_engine_itself(moe_engine):
    digest = moe_engine.plan.digest
    with serving(moe_engine.sampler, digest) as url, connected(url, digest) as remote:
        snapshot = moe_engine.snapshot()
        report = push(snapshot, remote, bucket_bytes=20_000)
        assert remote.version == snapshot.version == report.version
        assert not remote.capabilities.bits
        wanted = requests_of(4, stop_token_ids=())
        there, here = remote.generate(wanted), moe_engine.sampler.generate(wanted)
        for one, other in zip(there, here, strict=True):
            assert_same_bytes(one.tokens_R, other.tokens_R)
            assert one.version_R.tolist() == [snapshot.version] * len(one.tokens_R)
        assert remote.describe() == moe_engine.sampler.describe()
        with pytest.raises(SyncError, match="versions only grow"):
            push(snapshot, remote)
