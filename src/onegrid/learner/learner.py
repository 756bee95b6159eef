"""The learner: FP32 masters, one forward on the published grid, gradients, an optimizer, and the next version."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from collections.abc import Sequence as Items
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onegrid.errors import CapabilityError, CheckpointError
from onegrid.learner.adapter_files import adapters_of
from onegrid.learner.captured import MicroBatches, bucket_rows, refusal
from onegrid.learner.config import LearnerConfig, learning_rate
from onegrid.learner.gradients import scale_gradients, squares_by_group
from onegrid.learner.loss import LossConfig, loss_metrics, policy_loss, token_weights
from onegrid.learner.masters import gather
from onegrid.learner.packing import alignment, attend_packed, micro_batches, pack, rows_are_alone
from onegrid.learner.recover import make_room, refuse_lost_moments, saying_what_waits, without_leftovers
from onegrid.learner.replay import Replay, routing_metrics
from onegrid.learner.weights import GradWeights
from onegrid.model.canonical import Canonical
from onegrid.model.decoder import Rows, decode_rows, head_name
from onegrid.model.derived import canonical_parts, sums_of
from onegrid.model.kv import kv_grid
from onegrid.model.live import LiveWeights
from onegrid.model.publish import publish
from onegrid.model.rope import rope_table
from onegrid.model.spec import ModelSpec, tensor_shapes
from onegrid.model.stacks import is_stack, stacks
from onegrid.ops.logprob import token_logp
from onegrid.ops.packed_attention import Segments
from onegrid.ops.pins import pin, round_up
from onegrid.recipe import Plan
from onegrid.types import Batch, Sequence


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """What one forward and backward pass saw. Lists follow the batch's sequences."""

    logp: list[Tensor]
    """FP32 [R] nats, of every response token, masked ones too."""
    metrics: dict[str, float]
    num_micro_batches: int


class Learner:
    """Owns the masters and the optimizer; its forward reads the codes that `canonical` publishes.

    weights  canonical name -> FP32, BF16 or FP16 tensor; every tensor of the spec, no other
    Raises WeightsError for a missing, extra or misshaped tensor, NonFiniteError for NaN or Inf.
    """

    def __init__(
        self,
        spec: ModelSpec,
        plan: Plan,
        weights: Mapping[str, Tensor],
        config: LearnerConfig,
        *,
        loss: LossConfig | None = None,
        device: torch.device | str = "cpu",
        version: int = 0,
        kernels: str = "auto",
    ) -> None:
        pin(device)
        self.spec, self.plan, self.config = spec, plan, config
        self.loss = loss or LossConfig()
        self.device = torch.device(device)
        self.version = version
        self.num_updates = 0
        self.keys = stacks(spec)
        self.masters = {key: t.requires_grad_() for key, t in gather(spec, self.keys, weights, self.device).items()}
        self.adapters = adapters_of(config.lora, spec, self.masters) if config.lora else None
        self.trained = self.adapters.factors if self.adapters else self.masters
        """What the optimizer moves, by name: the masters, or the factors of their adapters."""
        self.live = LiveWeights(spec, plan, side="learner", device=self.device, kernels=kernels, weights=config.weights)
        self.live.derive()
        self.grad_weights = GradWeights(self.live, self.masters)
        self.align, self.dense = alignment(plan), self.device.type == "cpu" and rows_are_alone(plan)
        self.written: dict[str, tuple[int, int, int]] = {}
        """Of the last quantization, by key: updates so far, torch's own count of writes to the master (which its fused
        optimizers do not move), and the digest of the codes."""
        self.rope = rope_table(spec, 0, self.device)
        self.routed: list[Tensor | None] = []
        """Of each micro-batch of the last call: how many recorded experts were found here, of how many."""
        self.kv_grid = kv_grid(plan.learner_kv)
        self.captured = self._capturing()
        decayed = [t for t in self.trained.values() if t.dim() >= 2]
        plain = [t for t in self.trained.values() if t.dim() < 2]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": config.weight_decay},
                {"params": plain, "weight_decay": 0.0},
            ],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=self.device.type == "cuda" or None,  # in place: memory cannot run out half way
        )
        self._quantize()

    def _values(self) -> dict[str, Tensor]:
        """Masters rounded to BF16: the numbers both sides quantize."""
        return {key: t.detach().to(torch.bfloat16) for key, t in self.masters.items()}

    def _quantize(self) -> None:
        """Codes, scales and operands of the current masters, in place: once per version."""
        self.quantized = False
        if self.adapters:
            self.adapters.merge()
        codes = publish(self._values(), self.keys, self.plan, side="learner")
        sums = sums_of([canonical_parts(value) for value in codes.values()])
        self.written = {
            key: (self.num_updates, self.masters[key]._version, made) for key, made in zip(codes, sums, strict=True)
        }
        for key, value in codes.items():
            self.live.write(key, value)
        self.live.derive()
        self.grad_weights.refresh()
        self.quantized = True

    def _all_or_nothing(self) -> AbstractContextManager[None]:
        """What fails inside leaves no gradient behind."""
        return without_leftovers(self.optimizer, max_tokens=self.config.max_tokens, recompute=self.config.recompute)

    def _settle(self) -> None:
        """Quantizes again what a failure (memory that ran out) left half quantized."""
        if not self.quantized:
            self._quantize()

    def adopt(self, plan: Plan) -> None:
        """Goes over to another plan of the same model, between two steps. Masters, optimizer and version stay."""
        live = LiveWeights(self.spec, plan, side="learner", device=self.device, weights=self.config.weights)
        live.kernels = self.live.kernels
        live.derive()
        grad_weights = GradWeights(live, self.masters)
        self.plan, self.live, self.grad_weights = plan, live, grad_weights  # all of it, or nothing has changed
        self.align, self.dense = alignment(plan), self.device.type == "cpu" and rows_are_alone(plan)
        self.captured = self._capturing()
        self._quantize()

    def _capturing(self) -> MicroBatches | None:
        """Where micro-batches are captured, what holds them. On a GPU a wish that cannot be met is a warning."""
        why = refusal(self.config, self.device, self.live.kernels, self.grad_weights)
        if why and self.config.capture and self.device.type == "cuda":
            warnings.warn(f"learner.capture: micro-batches run without graphs, since {why}", stacklevel=3)
        return None if why else MicroBatches(self.grad_weights)

    def canonical(self) -> dict[str, Canonical]:
        """What the sampler must hold of this version, by canonical name.

        The very codes of the learner's forward, or, in a mixed pairing, those of the sampler's own quantizers.
        """
        self._settle()
        if not self.plan.mixed:
            return {name: self.live.canonical(name) for name in self.live.names()}
        twin = LiveWeights(self.spec, self.plan, side="sampler", device=self.device, weights="decoded")
        for key, value in publish(self._values(), self.keys, self.plan, side="sampler").items():
            twin.write(key, value)
        return {name: twin.canonical(name) for name in twin.names()}

    def tensors(self) -> dict[str, Tensor]:
        """FP32 masters by canonical name, as views."""
        out: dict[str, Tensor] = {}
        for key, names in self.keys.items():
            master = self.masters[key].detach()
            out |= {name: master[i] if is_stack(key) else master for i, name in enumerate(names)}
        return {name: out[name] for name in tensor_shapes(self.spec)}

    def forward(self, sequences: Items[Sequence], temperature: float) -> tuple[list[Tensor], list[Tensor]]:
        """Log-probability and entropy FP32 [R] of every response token, with gradients where they are enabled."""
        self._settle()
        bucket = None if self.captured is None else bucket_rows
        packed = pack(sequences, align=self.align, dense=self.dense, device=self.device, bucket=bucket)
        self.grad_weights.apart_A = packed.apart_A
        replay = Replay(sequences, packed, forced=self.config.replay_routing)
        self.reach(int(packed.rows.positions_N.max()) + 1)
        embedded_ND = self.grad_weights.embedded(packed.rows.tokens_N)
        if self.captured is not None and torch.is_grad_enabled() and replay.found is None:
            hidden_ND = self.captured.hidden(embedded_ND, packed, self._decode, self._rotations)
        else:
            hidden_ND = self._decode(embedded_ND, packed.rows, packed.segments, replay)
        self.routed.append(replay.equal())
        kept = _kept(sequences, self.device)
        head = head_name(self.spec)
        logp, entropy = token_logp(
            hidden_ND[packed.predict_P],
            self.live.tensor(head),
            packed.target_P,
            temperature=temperature,
            kept=kept,
            master_VD=self.masters[head],
        )
        lengths = [len(s.tokens_T) - s.num_prompt for s in sequences]
        return list(logp.split(lengths)), list(entropy.split(lengths))

    def _decode(self, embedded_ND: Tensor, rows: Rows, segments: Segments, replay: Replay | None = None) -> Tensor:
        """Hidden states of packed rows."""
        return decode_rows(
            self.spec,
            self.grad_weights,
            rows,
            attend_packed(segments, self.live.kernels),
            rope=self.rope,
            routes=None if replay is None else replay.found,
            forced_NLK=None if replay is None else replay.forced_NLK,
            embedded_ND=embedded_ND,
            kv_grid=self.kv_grid,
            recompute=self.config.recompute,
            kernels=self.live.kernels,
        )

    def _rotations(self, num_positions: int) -> tuple[Tensor, Tensor]:
        """Tables for so many positions, or for all that the model has."""
        self.reach(min(num_positions, self.spec.max_positions))
        return self.rope

    def clear_gradients(self) -> None:
        """Drops all gradients; those that captured graphs sum into become zero where they lie."""
        if self.captured is None:
            self.optimizer.zero_grad(set_to_none=True)
        else:
            self.captured.zero()

    def plan_micro_batches(self, sequences: Items[Sequence]) -> list[list[int]]:
        """Which sequences go together."""
        rows = [round_up(len(s.tokens_T) - 1, self.align) for s in sequences]
        return micro_batches(rows, max_tokens=self.config.max_tokens)

    @torch.no_grad()
    def log_probs(self, batch: Batch) -> list[Tensor]:
        """FP32 [R] per sequence at the batch's temperature, without gradients; as `forward_backward` sees."""
        out: list[Tensor] = [torch.empty(0)] * len(batch.sequences)
        self.routed.clear()
        for indices in self.plan_micro_batches(batch.sequences):
            logp, _ = self.forward([batch.sequences[i] for i in indices], batch.temperature)
            for index, logp_R in zip(indices, logp, strict=True):
                out[index] = logp_R
        return out

    def forward_backward(
        self,
        batch: Batch,
        *,
        old_logp: Items[Tensor] | None = None,
        reference_logp: Items[Tensor] | None = None,
        correction: Items[Tensor] | None = None,
    ) -> StepReport:
        """Gradients of the batch's loss, added to the `.grad` of what is trained.

        old_logp        FP32 [R] per sequence that the ratio is taken to; None: the sampler's (exact pairings)
        reference_logp  FP32 [R] of the reference policy
        correction      FP32 [R] detached importance weights of sampler to learner
        Loss, metrics and gradients do not depend on the split into micro-batches beyond the order of FP32 sums.
        """
        masks = [s.mask_R.to(self.device) for s in batch.sequences]
        weights = token_weights(masks, self.loss.aggregation, self.loss.max_len)
        old = [s.sampler_logp_R for s in batch.sequences] if old_logp is None else list(old_logp)
        logp_out: list[Tensor] = [torch.empty(0)] * len(batch.sequences)
        self.routed.clear()
        if self.captured is not None:
            self.captured.begin()
        sums, plan = [], self.plan_micro_batches(batch.sequences)
        with self._all_or_nothing():
            for indices in plan:
                logp, entropy = self.forward([batch.sequences[i] for i in indices], batch.temperature)
                for index, logp_R in zip(indices, logp, strict=True):
                    logp_out[index] = logp_R.detach()

                def flat(per_sequence: Items[Tensor] | None, indices: list[int] = indices) -> Tensor | None:
                    if per_sequence is None:
                        return None
                    return torch.cat([per_sequence[i].to(self.device) for i in indices])

                loss, part = policy_loss(
                    torch.cat(logp),
                    _given(flat(old)),
                    advantage_N=_given(flat([s.advantage_R for s in batch.sequences])),
                    weight_N=_given(flat(weights)),
                    mask_N=_given(flat(masks)),
                    config=self.loss,
                    reference_logp_N=flat(reference_logp),
                    correction_N=flat(correction),
                    entropy_N=torch.cat(entropy),
                    lengths=[len(logp_R) for logp_R in logp],
                )
                sums.append(part)
                loss.backward()
        self._refuse_ignored_modes()
        metrics = loss_metrics(sums) | routing_metrics(self.routed)
        return StepReport(logp=logp_out, metrics=metrics, num_micro_batches=len(plan))

    def step(self) -> dict[str, float]:
        """Clips, updates the masters (or the adapters), clears the gradients and makes the next version.

        Raises NonFiniteError naming the first tensor with a NaN or Inf gradient; nothing is changed then.
        """
        with self._all_or_nothing():
            squares = squares_by_group(self.trained)
            total, limit = sum(squares.values()) ** 0.5, self.config.max_grad_norm
            if limit and total > limit:
                scale_gradients(self.trained, limit / total)
            make_room(self.optimizer)  # nothing is allocated while numbers change
        lr = learning_rate(self.config, self.num_updates)
        for param_group in self.optimizer.param_groups:
            param_group["lr"] = lr
        self.optimizer.step()
        self.clear_gradients()
        self.num_updates += 1
        self.version += 1
        with saying_what_waits(self.version):
            self._quantize()
        groups = {f"train/grad_norm/{group}": square**0.5 for group, square in squares.items()}
        bound = {"sync/adapter_modules": float(self.adapters.num_modules())} if self.adapters else {}
        saved = {"perf/operand_bytes_saved": float(self.live.saved_bytes)} if self.live.saved_bytes else {}
        return {"train/grad_norm": total, "train/lr": lr, **groups, **bound, **saved}

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on: masters (or adapters), optimizer, version, plan digest."""
        masters = {key: t.detach() for key, t in self.masters.items()}
        return {
            **({"adapters": self.adapters.state_dict()} if self.adapters else {"masters": masters}),
            "optimizer": self.optimizer.state_dict(),
            "version": self.version,
            "num_updates": self.num_updates,
            "plan_digest": self.plan.digest,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes a state back. Raises CheckpointError if a part is missing or it belongs to another model or plan."""
        held = "adapters" if self.adapters else "masters"
        missing = {held, "optimizer", "version", "num_updates", "plan_digest"} - state.keys()
        if held in missing and state.keys() & {"adapters", "masters"}:
            raise CheckpointError(
                f"the state holds no {held}: it was made {'without' if self.adapters else 'with'} learner.lora"
            )
        if missing:
            raise CheckpointError(f"the learner's state lacks {sorted(missing)}")
        if state["plan_digest"] != self.plan.digest:
            raise CheckpointError(
                f"the state was made with plan {state['plan_digest'][:12]}, this run has {self.plan.digest[:12]}; "
                "resume with the same recipe and model"
            )
        for name in ("version", "num_updates"):
            if type(state[name]) is not int or state[name] < 0:
                raise CheckpointError(
                    f"the learner's state has {name} {state[name]!r}; it must be an integer from 0 on"
                )
        shapes = {key: tuple(t.shape) for key, t in self.masters.items()}
        if not self.adapters and {key: tuple(t.shape) for key, t in state["masters"].items()} != shapes:
            raise CheckpointError("the state's tensors are not those of this model")
        if state["num_updates"]:
            refuse_lost_moments(self.optimizer, self.trained, state["optimizer"].get("state", {}))
        if self.adapters:
            self.adapters.load_state_dict(state["adapters"])
        else:
            with torch.no_grad():
                for key, master in self.masters.items():
                    master.copy_(state["masters"][key])
        self.optimizer.load_state_dict(state["optimizer"])
        self.version, self.num_updates = state["version"], state["num_updates"]
        self._quantize()

    def reach(self, num_positions: int) -> None:
        """Makes the position table long enough. CapabilityError beyond the model's positions."""
        if num_positions > self.spec.max_positions:
            raise CapabilityError(f"{num_positions} positions; the model has {self.spec.max_positions}")
        if num_positions > len(self.rope[0]):
            self.rope = rope_table(self.spec, round_up(num_positions, 256), self.device)

    def _refuse_ignored_modes(self) -> None:
        """A backward mode that was asked for and did not run is an error."""
        for site in self.grad_weights.sites.values():
            if set(site.calls) - {site.backward}:
                raise CapabilityError(f"{site.key}: asked for backward {site.backward!r}, ran {sorted(site.calls)}")


def _kept(sequences: Items[Sequence], device: torch.device) -> list[Tensor] | None:
    if all(s.kept is None for s in sequences):
        return None
    whole = torch.empty(0, dtype=torch.int64, device=device)
    out: list[Tensor] = []
    for s in sequences:
        out += [whole] * len(s.sampler_logp_R) if s.kept is None else [ids.to(device) for ids in s.kept]
    return out


def _given(x: Tensor | None) -> Tensor:
    assert x is not None
    return x
