"""How a new version gets into a sampler: staged whole, swapped in place, proved, or not at all.

Staging is one copy of the canonical bytes. A commit exchanges it with the live bytes, in the storage that kernels and
captured graphs read, so the version before is at hand until the next `begin` and can be put back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn, Protocol

import torch
from torch import Tensor

from onegrid.errors import SyncError
from onegrid.formats import digests
from onegrid.model.canonical import Canonical, count_moved, dtype_name, format_of, raw_bytes
from onegrid.sampler.coverage import Coverage
from onegrid.types import Bucket, Entry, Manifest, Piece

WORD = (1 << 64) - 1
LAST = (1 << 63) - 1
"""Rollouts carry versions as int64."""


def expected_digests(manifest: Manifest) -> dict[str, int]:
    """Digest of every tensor of a manifest: digests add up over parts, modulo 2^64."""
    return {name: sum(x.digest for x in entry.parts.values()) & WORD for name, entry in manifest.entries.items()}


class Store(Protocol):
    """Live weights: canonical parts, and the operands that matmuls read, derived from them in place.

    `model.live.LiveWeights` is one.
    """

    def names(self) -> list[str]:
        """Every canonical name."""
        ...

    def parts(self, name: str) -> dict[str, Tensor]:
        """Canonical storage by part, as views that may be written."""
        ...

    def canonical(self, name: str) -> Canonical:
        """The tensor as views of that storage."""
        ...

    def derive(self) -> None:
        """Writes every operand anew from the canonical parts, into the storage it has."""
        ...

    def verify(self) -> None:
        """SyncError C3 naming tensors whose operand is not, byte for byte, what the canonical parts give."""
        ...


class Intake:
    """One transaction at a time over a Store.

    version  the version that serves; None before the first
    keeps_staging  False: what a commit has put aside is given back when the new version has served
    serving  False before the first version, and where a commit failed and could not be undone
    refused  True from a commit that was undone to the next transaction
    """

    def __init__(
        self, store: Store, *, plan_digest: str, version: int | None = None, keeps_staging: bool = True
    ) -> None:
        self.store = store
        self.keeps_staging = keeps_staging
        self.plan_digest = plan_digest
        self.version = version
        self.serving = version is not None
        self.digests = {} if version is None else self.digest(store.names())
        self._staged: dict[str, dict[str, Tensor]] | None = None
        self._scratch: Tensor | None = None
        self._opened: Manifest | None = None
        self._broken = ""
        self._coverage: dict[tuple[str, str], Coverage] = {}
        self._undo: tuple[int | None, dict[str, int]] | None = None
        self.refused = False

    def begin(self, manifest: Manifest) -> None:
        """Opens a transaction. What was staged and never committed, and the way back from the last commit, are lost.

        SyncError: C7 if the version does not grow or is no int64, C1 for another plan or format, C5 for missing, extra
        or misshaped tensors.
        """
        self._close()
        if not -1 <= manifest.version < LAST:
            raise SyncError(f"version {manifest.version} is offered; allowed are -1 to {LAST - 1}", condition="C7")
        if self.version is not None and manifest.version < self.version + self.serving:  # what was lost may come again
            raise SyncError(
                f"version {manifest.version} is offered after {self.version}; versions only grow: "
                "after a resume, restore the learner's version",
                condition="C7",
            )
        if manifest.plan_digest != self.plan_digest:
            raise SyncError(
                f"the sampler runs plan {self.plan_digest}, the manifest is of plan {manifest.plan_digest}; "
                "resolve one plan and give it to both",
                condition="C1",
            )
        self._check_names(manifest)
        for name, entry in manifest.entries.items():
            self._check_entry(name, entry)
        if self._staged is None:
            staged = {
                name: {part: torch.empty_like(x) for part, x in self.store.parts(name).items()}
                for name in self.store.names()
            }
            self._scratch = _scratch_for(staged)
            self._staged = staged
        self._coverage = {
            (name, part): Coverage(x.num_bytes)
            for name, entry in manifest.entries.items()
            for part, x in entry.parts.items()
        }
        self._opened, self.refused = manifest, False

    def receive(self, bucket: Bucket) -> None:
        """Stages a bucket. SyncError C5 for pieces out of place; the transaction can then only be aborted."""
        manifest = self._transaction("receive")
        if bucket.version != manifest.version:
            self._break(f"a bucket of version {bucket.version} in the transaction of {manifest.version}", ())
        places = [self.place_of(piece) for piece in bucket.pieces]
        _copy_all(places, [piece.data for piece in bucket.pieces])

    def place_of(self, piece: Piece) -> Tensor:
        """Where its bytes go in staging; notes that they have come."""
        end = piece.offset + piece.data.numel()
        where = f"{piece.name} [{piece.part}] bytes {piece.offset}..{end}"
        coverage = self._coverage.get((piece.name, piece.part))
        if coverage is None:
            self._break(f"{where}: not in the manifest", (piece.name,))
        if piece.data.dtype != torch.uint8 or piece.data.dim() != 1:
            self._break(f"{where}: {piece.data.dtype} of {piece.data.dim()} axes, expected uint8 of one", (piece.name,))
        if piece.offset < 0 or end > coverage.num_bytes:
            self._break(f"{where}: beyond its {coverage.num_bytes} bytes", (piece.name,))
        if not coverage.add(piece.offset, end):
            self._break(f"{where}: arrived twice", (piece.name,))
        assert self._staged is not None
        return raw_bytes(self._staged[piece.name][piece.part])[piece.offset : end]

    def commit(self, version: int) -> float | None:
        """Swaps the staged version in, proves its bytes against the manifest and derives what kernels read.

        Returns the share of stored elements that moved, None for a first version. SyncError C5 if anything is missing,
        C2 for other bytes than the manifest's; the version before is then live again. Operands are proved by `digest`,
        which the sender asks for next: a proof by the hand that just derived them would prove little.
        """
        manifest = self._transaction("commit")
        if version != manifest.version:
            self._break(f"commit of {version} in the transaction of {manifest.version}", (), condition="C7")
        self.check_complete()
        share = None if self.version is None else self._moved_share()
        before = (self.version, self.digests)
        expected = expected_digests(manifest)
        try:
            self.swap()
            self.prove(expected, self.canonical_digests(expected))
            self.derive()
        except BaseException as error:
            self._restore(before, error)
            raise
        self._close()
        self.version, self.digests, self.serving, self._undo = version, expected, True, before
        return share

    def abort(self) -> bool:
        """Drops the open transaction; without one, puts back the version before the last commit unless it has served.

        Returns True where a commit was undone.
        """
        undo, opened = self._undo, self._opened
        self._close()
        if opened is not None or undo is None:
            return False
        self._restore(undo, None)
        return True

    def settle(self) -> None:
        """Called when the version has served: a later abort no longer undoes its commit."""
        self._undo = None
        if not (self.keeps_staging or self.refused or self._opened):
            self._staged = self._scratch = None

    def stored(self, name: str) -> dict[str, Tensor]:
        """Bytes by part of the version that came last: live, or where it was refused, what was put aside of it."""
        if self.refused and self._staged is not None:
            return self._staged[name]
        return self.store.parts(name)

    def digest(self, names: Iterable[str]) -> dict[str, int]:
        """Digests from live storage. SyncError C5 for a name that is not there, C3 for a stale operand."""
        names, known = list(names), set(self.store.names())
        unknown = tuple(name for name in names if name not in known)
        if unknown:
            raise SyncError(f"no such tensor in the sampler: {_shorten(unknown)}", condition="C5", tensors=unknown)
        self.store.verify()
        return self.canonical_digests(names)

    def canonical_digests(self, names: Iterable[str]) -> dict[str, int]:
        """Digests of the live canonical bytes, without a look at the operands."""
        names = list(names)
        parts = [list(self.store.parts(name).items()) for name in names]
        values = iter(digests([(x, part) for items in parts for part, x in items]))
        return {name: sum(next(values) for _ in items) & WORD for name, items in zip(names, parts, strict=True)}

    def verify(self) -> None:
        """SyncError C2 or C3 unless every tensor still is that of the version; nothing serves until it is."""
        self.serving = False
        if self.version is not None:
            self.prove(self.digests, self.digest(self.digests))
            self.serving = True

    def prove(self, expected: Mapping[str, int], found: Mapping[str, int]) -> None:
        """SyncError C2 naming the tensors whose digests are not the expected ones."""
        wrong = tuple(name for name, value in expected.items() if found[name] != value)
        if wrong:
            message = f"{len(wrong)} tensors hold other bytes than the manifest says: {_shorten(wrong)}"
            raise SyncError(message, condition="C2", tensors=wrong)

    def check_complete(self) -> None:
        """SyncError C5 naming every tensor of which bytes are missing."""
        missing = {key: c for key, c in self._coverage.items() if not c.complete}
        if missing:
            listed = [f"{n} [{p}] {c.missing_bytes} of {c.num_bytes} bytes" for (n, p), c in missing.items()]
            self._break(f"never arrived: {_shorten(listed)}", tuple(dict.fromkeys(name for name, _ in missing)))

    def swap(self) -> None:
        """Exchanges staged and live bytes, in place; allocates nothing, so that it cannot stop half way."""
        assert self._staged is not None and self._scratch is not None
        small: list[tuple[Tensor, Tensor]] = []
        room = len(self._scratch)
        for name, staged in self._staged.items():
            for part, live in self.store.parts(name).items():
                one, other = raw_bytes(live), raw_bytes(staged[part])
                if len(one) > min(SMALL_BYTES, len(self._scratch)):
                    _exchange(one, other, self._scratch)
                    continue
                if len(one) > room:
                    _exchange_all(small, self._scratch)
                    small, room = [], len(self._scratch)
                small.append((one, other))
                room -= len(one)
        _exchange_all(small, self._scratch)

    def derive(self) -> None:
        """Recomputes every operand."""
        self.store.derive()

    def old(self, name: str) -> dict[str, Tensor]:
        """Bytes by part that a commit has just exchanged for new ones."""
        assert self._staged is not None
        return self._staged[name]

    def _restore(self, before: tuple[int | None, dict[str, int]], cause: BaseException | None) -> None:
        """Puts the version `before` back, byte for byte, or leaves nothing serving."""
        self._close()
        self.refused = True
        self.version, self.digests = before
        self.serving = False
        try:
            self.swap()
            self.derive()
            self.verify()
        except (SyncError, torch.OutOfMemoryError) as error:
            if cause is None:
                raise
            cause.add_note(f"version {self.version} could not be put back and nothing serves: {error}")

    def _moved_share(self) -> float:
        assert self._staged is not None
        moved: list[Tensor] = []  # the device is waited for once
        total = 0
        for name, staged in self._staged.items():
            after = staged["codes"] if "codes" in staged else staged["values"]
            num_moved, num = count_moved(self.store.canonical(name), after)
            moved.append(num_moved)
            total += num
        return int(torch.stack(moved).sum()) / total if total else 0.0

    def _check_names(self, manifest: Manifest) -> None:
        live, offered = set(self.store.names()), manifest.entries.keys()
        for what, names in (("missing from", live - offered), ("unknown to the sampler but in", offered - live)):
            if names:
                message = f"{len(names)} tensors {what} the manifest: {_shorten(sorted(names))}"
                raise SyncError(message, condition="C5", tensors=tuple(sorted(names)))

    def _check_entry(self, name: str, entry: Entry) -> None:
        live = self.store.canonical(name)
        if entry.format != format_of(live):
            message = f"{name} comes as {entry.format} and is {format_of(live)} in the sampler; see `onegrid plan`"
            raise SyncError(message, condition="C1", tensors=(name,))
        expected = {part: (dtype_name(x), tuple(x.shape), x.nbytes) for part, x in self.store.parts(name).items()}
        offered = {part: (x.dtype, tuple(x.shape), x.num_bytes) for part, x in entry.parts.items()}
        if tuple(entry.shape) != tuple(live.shape) or offered != expected:
            raise SyncError(
                f"{name} comes with shape {tuple(entry.shape)} and parts {offered}; "
                f"the sampler has {tuple(live.shape)} and {expected}",
                condition="C5",
                tensors=(name,),
            )

    def _transaction(self, what: str) -> Manifest:
        if self._opened is None:
            raise SyncError(f"{what} without begin: too late, or never announced", condition="C5")
        if self._broken:
            raise SyncError(f"{what} after a failure ({self._broken}); abort and begin again", condition="C5")
        return self._opened

    def _break(self, message: str, tensors: tuple[str, ...], condition: str = "C5") -> NoReturn:
        self._broken = message
        raise SyncError(message, condition=condition, tensors=tensors)

    def _close(self) -> None:
        self._opened, self._undo, self._broken, self._coverage = None, None, "", {}


SCRATCH_BYTES = 1 << 26
"""Most bytes that are exchanged at once."""


SMALL_BYTES = 1 << 21
"""Pieces up to this size go together: of them a GPU's launches cost more than the bytes."""


def _scratch_for(staged: Mapping[str, Mapping[str, Tensor]]) -> Tensor:
    parts = [x for part in staged.values() for x in part.values()]
    size = max((x.numel() * x.element_size() for x in parts), default=0)
    device = parts[0].device if parts else torch.device("cpu")
    return torch.empty(min(size, SCRATCH_BYTES), dtype=torch.uint8, device=device)


def _exchange(one: Tensor, other: Tensor, scratch: Tensor) -> None:
    """Swaps two equally long runs of bytes, piece by piece."""
    for start in range(0, len(one), max(1, len(scratch))):
        piece = slice(start, start + len(scratch))
        kept = scratch[: len(one[piece])]
        kept.copy_(one[piece])
        one[piece] = other[piece]
        other[piece] = kept


def _exchange_all(pairs: Sequence[tuple[Tensor, Tensor]], scratch: Tensor) -> None:
    """Swaps small runs of bytes, which all have room in `scratch`, in three steps."""
    if not pairs:
        return
    ones, others = ([pair[side] for pair in pairs] for side in (0, 1))
    kept = list(scratch[: sum(map(len, ones))].split([len(one) for one in ones]))
    for target, source in ((kept, ones), (ones, others), (others, kept)):
        torch._foreach_copy_(target, source)


def _copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies runs of bytes, small ones together."""
    small: tuple[list[Tensor], list[Tensor]] = [], []
    for target, source in zip(targets, sources, strict=True):
        if 0 < len(target) <= SMALL_BYTES and target.device == source.device:
            small[0].append(target)
            small[1].append(source)
        else:
            target.copy_(source)
    if small[0]:
        torch._foreach_copy_(*small)


def _shorten(names: Iterable[str], limit: int = 8) -> str:
    names = list(names)
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest
