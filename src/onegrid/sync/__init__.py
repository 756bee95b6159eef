"""Learner to sampler: the weights of a version, whole, in place and proved."""

from onegrid.sync.snapshot import Snapshot, entry_of, manifest_of
from onegrid.sync.transaction import SyncReport, push
from onegrid.sync.transport import DEFAULT_BUCKET_BYTES, buckets

__all__ = ["DEFAULT_BUCKET_BYTES", "Snapshot", "SyncReport", "buckets", "entry_of", "manifest_of", "push"]
