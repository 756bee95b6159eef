"""`onegrid serve`: a checkpoint behind HTTP, as the sampler of a learner elsewhere and through the OpenAI API."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from onegrid.cli.plan import plan_of
from onegrid.errors import ConfigError
from onegrid.model.canonical import Snapshot
from onegrid.model.shards import read_object
from onegrid.model.spec import ModelSpec
from onegrid.ops.memory import keep_freed_memory
from onegrid.ops.selftest import require
from onegrid.rl.hf_tokenizer import ChatTemplate, has_chat_template
from onegrid.rl.tokenizer import load_tokenizer, stop_tokens
from onegrid.sampler.base import Sampler
from onegrid.sampler.engine import Engine, SamplerConfig
from onegrid.sampler.remote import read_token
from onegrid.sampler.vllm.config import VllmConfig
from onegrid.study.parts import find_device, prove_pins
from onegrid.study.samplers import UNTRAINED, bits_within, closing_sampler, make_sampler, published
from onegrid.sync import push


def run(
    checkpoint: Path,
    recipe: str,
    *,
    host: str,
    port: int,
    token_file: Path | None,
    device: str,
    max_slots: int,
    max_len: int,
    max_body_mib: int,
    update_seconds: float,
    weights: str = "auto",
    engine: str = "embedded",
    road: str = "decoded",
) -> None:
    """See `onegrid serve --help`."""
    try:
        import uvicorn

        from onegrid.sampler.server.app import Limits, Service, make_app
        from onegrid.sampler.server.openai import Model, OpenAI
    except ImportError as error:
        raise ConfigError(f'serving needs starlette and uvicorn: pip install "onegrid[serve]" ({error})') from error
    token = read_token(str(token_file) if token_file else "")
    loopback = is_loopback(host)
    if not token and not loopback:
        raise ConfigError(
            f"--host {host} is reached from outside this machine, and there is no token; whoever reaches it could "
            "replace the weights. Give --token-file, or bind 127.0.0.1"
        )
    if not update_seconds > 0:
        raise ConfigError(f"--update-seconds is {update_seconds}; it must be above 0")
    console = Console(highlight=False)
    device = find_device(device)
    if device == "cpu":
        keep_freed_memory()
    plan = plan_of(recipe, checkpoint)
    spec = ModelSpec.from_hf_config(read_object(checkpoint / "config.json"))
    tokenizer = load_tokenizer(checkpoint)
    config = SamplerConfig(max_slots=max_slots, max_len=min(max_len, spec.max_positions), weights=weights)
    live = published(checkpoint, spec, plan, device=device, weights=weights)
    proof = prove_pins(spec, live.kernels, device)
    if plan.exact:
        require(proof)
    sampler: Sampler
    if engine == "vllm":
        config = replace(config, engine="vllm", vllm=VllmConfig(road=road))  # type: ignore[arg-type]
        sampler = make_sampler(config, live, proof, decode_text=tokenizer.decode)
        tensors = {name: live.canonical(name) for name in live.names()}
        push(Snapshot(version=UNTRAINED, plan_digest=plan.digest, tensors=tensors), sampler)
    else:
        sampler = Engine(live, config, version=UNTRAINED, decode_text=tokenizer.decode)
    service = Service(
        sampler,
        plan_digest=plan.digest,
        token=token,
        limits=Limits(body_bytes=max_body_mib << 20, update_seconds=update_seconds),
        bits_within=bits_within(proof),
    )
    model = Model(
        name=checkpoint.resolve().name,
        tokenizer=tokenizer,
        stop_token_ids=stop_tokens(checkpoint),
        max_len=config.max_len,
        chat=ChatTemplate(checkpoint) if has_chat_template(checkpoint) else None,
    )
    hosts = None if token else ["127.0.0.1", "localhost", "[::1]", host]
    app = make_app(service, more=OpenAI(service, model).routes(), hosts=hosts)
    with closing_sampler(sampler), bind(host, port) as listening:
        name = f"[{host}]" if ":" in host else host
        console.print(f"plan {plan.digest[:16]} of {plan.recipe_name}, version {UNTRAINED} until a learner sends one")
        console.print(f"serving {model.name} on http://{name}:{listening.getsockname()[1]}", soft_wrap=True)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="on"))
        server.run(sockets=[listening])


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine alone. A name is, only if it is "localhost"."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. ConfigError where the address is taken or not of this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise ConfigError(f"cannot bind {host}:{port}: {error}; choose another --port, or 0 for a free one") from error
    return listening
