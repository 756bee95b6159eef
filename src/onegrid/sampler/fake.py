"""A sampler in plain torch for tests and for the fault campaign: every byte it was sent moves its tokens.

It keeps its operands transposed, replays a "graph" that holds addresses, caches prompts and can sleep, so that it can
go wrong in the ways that engines go wrong; `FAULTS` lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from onegrid.errors import CapabilityError, SyncError
from onegrid.formats import dequantize
from onegrid.model.canonical import Canonical, Snapshot, format_of, parts_of, raw_bytes
from onegrid.ops.draw import uniform
from onegrid.ops.logprob import log_probs
from onegrid.sampler.base import Capabilities, Live
from onegrid.sampler.draw import inverse_cdf, kept_set, streams, truncates
from onegrid.sampler.intake import Intake
from onegrid.sampler.stops import DecodeText, hit_stop_string, hit_stop_token, text_of
from onegrid.types import Bucket, Manifest, Piece, Request, Rollout

FAULTS = {
    "drop_piece": "the first piece of every transaction is lost and counted as received",
    "stale_scales": "a commit brings new codes under the scales of before",
    "stale_operand": "a commit does not derive the operands again",
    "ignore_commit": "a commit reports success and changes nothing but the version",
    "new_storage": "a commit puts operands into new storage, which the graph does not read",
    "flip_byte": "a commit changes one byte of the last tensor",
    "keep_prefix": "cached prompts survive a commit",
    "lose_on_sleep": "sleep loses the last tensor",
}


class FakeStore:
    """Canonical tensors with storage of their own, and each one's FP32 value transposed as its operand."""

    def __init__(self, template: Mapping[str, Canonical], *, device: torch.device) -> None:
        self.tensors = {name: _own(tensor, device) for name, tensor in template.items()}
        self.operands = {name: self._derived(name) for name in self.tensors}

    def names(self) -> list[str]:
        """See `intake.Store`."""
        return list(self.tensors)

    def parts(self, name: str) -> dict[str, Tensor]:
        """See `intake.Store`."""
        return parts_of(self.tensors[name])

    def canonical(self, name: str) -> Canonical:
        """See `intake.Store`."""
        return self.tensors[name]

    def derive(self) -> None:
        """See `intake.Store`."""
        for name, operand in self.operands.items():
            operand.copy_(self._derived(name))

    def verify(self) -> None:
        """See `intake.Store`."""
        wrong = tuple(
            name for name, x in self.operands.items() if not torch.equal(raw_bytes(x), raw_bytes(self._derived(name)))
        )
        if wrong:
            raise SyncError(
                f"operands not derived from their tensors: {', '.join(wrong)}", condition="C3", tensors=wrong
            )

    def _derived(self, name: str) -> Tensor:
        tensor = self.tensors[name]
        value = tensor.float() if isinstance(tensor, Tensor) else dequantize(tensor)
        return (value.mT if value.dim() > 1 else value).contiguous()


class FakeSampler:
    """Follows `base.Sampler` over any canonical tensors.

    template  shapes and formats; its values serve only if `version` is given, else everything starts as 0xFF bytes
    faults    names out of FAULTS; a sampler with faults does not check itself
    """

    def __init__(
        self,
        template: Snapshot,
        *,
        vocab_size: int = 16,
        version: int | None = None,
        faults: Iterable[str] = (),
        decode_text: DecodeText | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.faults = frozenset(faults)
        assert self.faults <= FAULTS.keys(), f"no such fault: {self.faults - FAULTS.keys()}"
        self.vocab_size, self.decode_text = vocab_size, decode_text
        self.store = FakeStore(template.tensors, device=torch.device(device))
        if version is None:
            for name in self.store.names():
                _fill(self.store.parts(name))
            self.store.derive()
        self.intake = FaultyIntake(self.store, plan_digest=template.plan_digest, version=version, faults=self.faults)
        self.graph = dict(self.store.operands)
        self.prefixes: dict[tuple[int | None, tuple[int, ...]], Tensor] = {}
        self.num_prefix_hits = 0
        self.asleep = False

    @property
    def version(self) -> int | None:
        """Version that serves."""
        return self.intake.version

    @property
    def capabilities(self) -> Capabilities:
        """Everything but experts."""
        return Capabilities(
            bits=False, kept_set=True, routing=False, stop_strings=self.decode_text is not None, captured=True
        )

    def describe(self) -> dict[str, Live]:
        """Every tensor, transposed."""
        tensors = self.store.tensors
        return {
            name: Live(format=format_of(x), shape=tuple(x.shape), kernel="sum", layout="transposed FP32")
            for name, x in tensors.items()
        }

    def generate(
        self, requests: Sequence[Request], on_finished: Callable[[Rollout], None] | None = None
    ) -> list[Rollout]:
        """One after another, the last first, so that nobody comes to rely on an order."""
        version = self._serving()
        self.intake.settle()
        rollouts = []
        for request in reversed(requests):
            rollouts.append(self._complete(request, version))
            if on_finished is not None:
                on_finished(rollouts[-1])
        return rollouts[::-1]

    def probe(self, prompts: Sequence[Sequence[int]], captured: bool = False) -> list[Tensor]:
        """captured replays the graph: the addresses that the operands had when this object was made."""
        self._serving()
        score_V = self._score(self.graph if captured else self.store.operands)
        return [log_probs(self._logits(score_V, prompt)[None], 1.0)[0] for prompt in prompts]

    def cached_versions(self) -> set[int]:
        """Versions of the weights that made what is cached; -1 for one that nobody knows."""
        return {-1 if version is None else version for version, _ in self.prefixes}

    def stored(self, name: str) -> dict[str, Tensor]:
        """See `Intake.stored`."""
        return self.intake.stored(name)

    def begin(self, manifest: Manifest) -> None:
        """See `Intake.begin`."""
        self.intake.begin(manifest)

    def receive(self, bucket: Bucket) -> None:
        """See `Intake.receive`."""
        self.intake.receive(bucket)

    def commit(self, version: int) -> float | None:
        """See `Intake.commit`."""
        share = self.intake.commit(version)
        if "keep_prefix" not in self.faults:
            self.prefixes.clear()
        return share

    def abort(self) -> None:
        """See `Intake.abort`."""
        if self.intake.abort():
            self.prefixes.clear()

    def digest(self, names: Iterable[str]) -> dict[str, int]:
        """See `Intake.digest`."""
        return self.intake.digest(names)

    def sleep(self) -> None:
        """Drops cached prompts."""
        self.asleep = True
        self.prefixes.clear()
        if "lose_on_sleep" in self.faults:
            _fill(self.store.parts(self.store.names()[-1]))
            self.store.derive()

    def wake(self) -> None:
        """SyncError C2 or C3 if anything was lost; then only a synchronization helps."""
        self.asleep = False
        self.intake.verify()

    def _serving(self) -> int:
        if self.version is None or not self.intake.serving:
            raise SyncError("no version of the weights is complete and proved; synchronize first", condition="C5")
        if self.asleep:
            raise CapabilityError("the sampler sleeps; wake it first")
        return self.version

    def _complete(self, request: Request, version: int) -> Rollout:
        sampling = request.sampling
        if sampling.record_routing:
            raise CapabilityError("the fake sampler has no experts to record")
        key = (None if "keep_prefix" in self.faults else version, request.prompt_tokens)
        self.num_prefix_hits += key in self.prefixes
        if key not in self.prefixes:
            self.prefixes[key] = self._score(self.store.operands)
        score_V = self.prefixes[key]
        stream_1 = streams([request], score_V.device)
        tokens: list[int] = []
        logps: list[float] = []
        kept: list[Tensor] = []
        stopped = False
        while len(tokens) < sampling.max_new_tokens and not stopped:
            logits_1V = self._logits(score_V, [*request.prompt_tokens, *tokens])[None]
            logp_1V = log_probs(logits_1V, sampling.temperature)
            if truncates(sampling):
                keep_1V = kept_set(logp_1V, sampling)
                logp_1V = log_probs(logits_1V, sampling.temperature, keep_1V)
                kept.append(keep_1V[0].nonzero().squeeze(1).cpu())
            position_1 = torch.tensor([len(tokens)], device=score_V.device)
            greedy = sampling.temperature == 0
            token_1 = logits_1V.argmax(-1) if greedy else inverse_cdf(logp_1V, uniform(stream_1, position_1))
            tokens.append(int(token_1))
            logps.append(float(logp_1V[0, token_1]))
            stopped = bool(hit_stop_token(token_1, sampling))
            if sampling.stop_strings and self.decode_text is not None:
                tokens_1R, length_1 = torch.tensor([tokens]), torch.tensor([len(tokens)])
                stopped |= bool(hit_stop_string(tokens_1R, length_1, sampling, self.decode_text))
        finish = "stop" if stopped else "length"
        return Rollout(
            request=request,
            tokens_R=torch.tensor(tokens),
            logp_R=torch.tensor(logps),
            version_R=torch.full((len(tokens),), version),
            finish=finish,
            text=text_of(tokens, finish, sampling, self.decode_text),
            kept=tuple(kept) if truncates(sampling) else None,
        )

    def _score(self, operands: Mapping[str, Tensor]) -> Tensor:
        """FP32 [V]: a fixed projection in which every weight takes part."""
        score_V = torch.zeros(self.vocab_size, dtype=torch.float64, device=next(iter(operands.values())).device)
        for operand in operands.values():
            value_N = operand.reshape(-1).double()
            index_N = torch.arange(len(value_N), device=value_N.device)
            sign_N = torch.cos(index_N.double())
            score_V.index_add_(0, index_N % self.vocab_size, value_N * sign_N / max(1, len(value_N)) ** 0.5)
        return score_V.float()

    def _logits(self, score_V: Tensor, tokens: Sequence[int]) -> Tensor:
        return score_V.roll(7 * tokens[-1] + len(tokens))


class FaultyIntake(Intake):
    """An intake that can misbehave, and then looks away."""

    def __init__(self, store: FakeStore, *, plan_digest: str, version: int | None, faults: frozenset[str]) -> None:
        self.faults = faults
        self.fake = store
        self.restoring = False
        super().__init__(store, plan_digest=plan_digest, version=version)

    def receive(self, bucket: Bucket) -> None:
        """Loses the first piece of a transaction where told to."""
        untouched = all(c.arrived_bytes == 0 for c in self._coverage.values())
        if "drop_piece" in self.faults and untouched and self._coverage:
            self._transaction("receive")
            lost: Piece = bucket.pieces[0]
            self._coverage[lost.name, lost.part].add(lost.offset, lost.offset + len(lost.data))
            assert self._staged is not None  # fresh memory may hold what was lost
            raw_bytes(self._staged[lost.name][lost.part])[lost.offset :][: len(lost.data)] = ~lost.data
            bucket = replace(bucket, pieces=bucket.pieces[1:])
        super().receive(bucket)

    def swap(self) -> None:
        """Swaps, or not, or not everything."""
        if "ignore_commit" in self.faults:
            return
        scales = {n: self.fake.parts(n)["scales"].clone() for n in self.fake.names() if "scales" in self.fake.parts(n)}
        super().swap()
        if self.restoring:
            return
        if "stale_scales" in self.faults:
            for name, before in scales.items():
                self.fake.parts(name)["scales"].copy_(before)
        if "flip_byte" in self.faults:
            part = next(iter(self.fake.parts(self.fake.names()[-1]).values()))
            raw_bytes(part)[-1] ^= 1

    def derive(self) -> None:
        """Derives, or not, or elsewhere."""
        if "stale_operand" in self.faults and not self.restoring:
            return
        if "new_storage" in self.faults and not self.restoring:
            self.fake.operands.update({name: x.clone() for name, x in self.fake.operands.items()})
        super().derive()

    def _restore(self, before: tuple[int | None, dict[str, int]], cause: BaseException | None) -> None:
        self.restoring = True
        super()._restore(before, cause)
        self.restoring = False

    def prove(self, expected: Mapping[str, int], found: Mapping[str, int]) -> None:
        """Only a sampler without faults, or one that lost something in its sleep, checks itself."""
        if self.faults <= {"lose_on_sleep"}:
            super().prove(expected, found)


def _own(tensor: Canonical, device: torch.device) -> Canonical:
    if isinstance(tensor, Tensor):
        return tensor.detach().to(device, copy=True).contiguous()
    parts = {part: x.detach().to(device, copy=True).contiguous() for part, x in parts_of(tensor).items()}
    return replace(tensor, **parts, factor=None)  # type: ignore[arg-type]


def _fill(parts: Mapping[str, Tensor]) -> None:
    """Every byte 0xFF: NaN in most formats, and never a weight by accident."""
    for x in parts.values():
        raw_bytes(x).fill_(0xFF)
