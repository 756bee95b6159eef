"""The sampler that a configuration asks for, and an engine that serves a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import onegrid
from onegrid.model.live import LiveWeights
from onegrid.model.publish import publish
from onegrid.model.spec import ModelSpec
from onegrid.model.stacks import is_stack
from onegrid.model.weights import load_weights
from onegrid.ops.selftest import Proof
from onegrid.recipe import Plan
from onegrid.sampler.base import Sampler
from onegrid.sampler.engine import Engine, SamplerConfig
from onegrid.sampler.remote import RemoteSampler
from onegrid.sampler.stops import DecodeText

UNTRAINED = -1
"""Version of weights as a checkpoint brings them: older than any that a learner publishes."""


def make_sampler(config: SamplerConfig, live: LiveWeights, proof: Proof, *, decode_text: DecodeText | None) -> Sampler:
    """The sampler of a run. `live` is the storage of an embedded engine; others keep their own."""
    if config.engine == "remote":
        return RemoteSampler(config.remote, plan_digest=live.plan.digest, bits_within=bits_within(proof))
    if config.engine == "vllm":
        from onegrid.sampler.vllm.adapter import VllmSampler

        return VllmSampler(
            live.spec,
            live.spec.to_hf_config(),
            live.plan,
            config.vllm,
            max_len=config.max_len,
            max_slots=config.max_slots,
            decode_text=decode_text,
        )
    return Engine(live, config, decode_text=decode_text)


@contextmanager
def closing_sampler(sampler: Sampler) -> Iterator[None]:
    """Gives back what a sampler holds outside of this process, however the block ends."""
    try:
        yield
    finally:
        close = getattr(sampler, "close", None)
        if close is not None:
            close()


def bits_within(proof: Proof) -> dict[str, str]:
    """What equal bits depend on, on this machine: both ends of a pairing must say the same."""
    return {
        "device": torch.device(proof.device).type,
        "instructions": proof.instructions,
        "kernels": proof.kernels,
        "torch": proof.torch,
        "threads": str(torch.get_num_threads()) if torch.device(proof.device).type == "cpu" else "",
        "onegrid": onegrid.__version__,
        "pins": "hold" if proof.passed else "fail",
    }


def published(folder: Path, spec: ModelSpec, plan: Plan, *, device: str, weights: str = "auto") -> LiveWeights:
    """Weights of a checkpoint on the sampler's grid, as a learner that starts from it publishes them.

    weights  see `SamplerConfig`
    Raises WeightsError for a checkpoint that does not fit the shapes.
    """
    tensors = load_weights(folder, spec)
    live = LiveWeights(spec, plan, side="sampler", device=device, weights=weights)
    values = {}
    for key, names in live.keys.items():
        parts = [tensors[name].to(torch.bfloat16) for name in names]
        values[key] = (torch.stack(parts) if is_stack(key) else parts[0]).to(device)
    for key, value in publish(values, live.keys, plan, side="sampler").items():
        live.write(key, value)
    live.derive()
    return live
