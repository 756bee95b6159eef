"""The part of the OpenAI API that a sampler can keep: completions and chats, with the log-probability of each token.

Log-probabilities are those of the sampled tokens at the sampling temperature, as training uses them. What is not
here (streaming, penalties, alternatives to the sampled token, ...) is refused by name, never ignored.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from onegrid.errors import CapabilityError, OnegridError
from onegrid.sampler.server.app import Service, refusal
from onegrid.types import Request as Sample
from onegrid.types import Rollout, Sampling

MAX_CHOICES = 1024
Chat = Sequence[dict[str, str]]
_SAME = {"temperature", "top_p", "top_k", "n", "seed", "stop", "logprobs", "model", "user", "max_tokens"}
_COMPLETION = _SAME | {"prompt"}
_CHAT = _SAME | {"messages", "max_completion_tokens", "top_logprobs"}
_NEUTRAL: dict[str, Any] = {
    "stream": False,
    "echo": False,
    "best_of": 1,
    "suffix": None,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": {},
    "tools": [],
    "top_logprobs": 0,
}
"""Settings that may be sent with the value that changes nothing."""


class Text(Protocol):
    """What the endpoints need of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """What is served, as text.

    chat  a chat as text up to where the model answers; None where the tokenizer has no template
    """

    name: str
    tokenizer: Text
    stop_token_ids: tuple[int, ...]
    max_len: int
    chat: Callable[[Chat], str] | None = None


class OpenAI:
    """Endpoints over a service, beside those of the sampler protocol."""

    def __init__(self, service: Service, model: Model) -> None:
        self.service, self.model = service, model

    def routes(self) -> list[Route]:
        """Their addresses."""
        return [
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/completions", self._answered(self.completions), methods=["POST"]),
            Route("/v1/chat/completions", self._answered(self.chats), methods=["POST"]),
        ]

    async def models(self, request: Request) -> Response:
        """The one model."""
        one = {"id": self.model.name, "object": "model", "created": 0, "owned_by": "onegrid"}
        return JSONResponse({"object": "list", "data": [one]})

    async def completions(self, asked: dict[str, Any]) -> dict[str, Any]:
        """`prompt` is a text, token ids, or a list of either."""
        _refuse_unknown(asked, _COMPLETION)
        logprobs = asked.get("logprobs")
        if logprobs is not None and (type(logprobs) is not int or logprobs != 0):
            raise CapabilityError(
                "logprobs must be 0 (those of the sampled tokens) or absent; alternatives are not kept"
            )
        prompts = [self._tokens(p) for p in _prompts(asked.get("prompt"))]
        rollouts = await self._sample(asked, prompts, cap=asked.get("max_tokens", 16))
        choices = []
        for index, rollout in enumerate(rollouts):
            told = None if logprobs is None else self._logprobs(rollout)
            choice = {"index": index, "text": rollout.text, "finish_reason": rollout.finish, "logprobs": told}
            choices.append(choice | {"version": _version(rollout)})
        return self._answer("cmpl", "text_completion", choices, prompts, rollouts)

    async def chats(self, asked: dict[str, Any]) -> dict[str, Any]:
        """`messages` go through the tokenizer's own template."""
        _refuse_unknown(asked, _CHAT)
        if self.model.chat is None:
            raise CapabilityError("the tokenizer of this model has no chat template; use /v1/completions")
        messages, logprobs = asked.get("messages"), asked.get("logprobs", False)
        good = isinstance(messages, list) and messages
        if not good or not all(isinstance(m, dict) and _is_message(m) for m in messages):  # type: ignore[union-attr]
            raise CapabilityError('messages must be a list of {"role": text, "content": text}')
        if type(logprobs) is not bool:
            raise CapabilityError(f"logprobs must be true or false, not {logprobs!r}")
        prompts = [self._tokens(self.model.chat(messages))]  # type: ignore[arg-type]
        room = self.model.max_len - len(prompts[0])
        cap = asked.get("max_completion_tokens", asked.get("max_tokens", max(1, room)))
        rollouts = await self._sample(asked, prompts, cap=cap)
        choices = []
        for index, rollout in enumerate(rollouts):
            told = {"content": self._chat_logprobs(rollout)} if logprobs else None
            message = {"role": "assistant", "content": rollout.text}
            choice = {"index": index, "message": message, "finish_reason": rollout.finish, "logprobs": told}
            choices.append(choice | {"version": _version(rollout)})
        return self._answer("chatcmpl", "chat.completion", choices, prompts, rollouts)

    def _answered(
        self, endpoint: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                asked = await self.service.json(request)
                model = asked.get("model", self.model.name)
                if model != self.model.name:
                    told = {"type": "NotFound", "message": f"no model {model!r} here; it is {self.model.name!r}"}
                    return JSONResponse({"error": told}, status_code=404)
                await self.service.settle()
                self.service.lease.refuse_others("")
                return JSONResponse(await endpoint(asked))
            except OnegridError as error:
                return refusal(error)
            except ClientDisconnect:
                return Response(status_code=499)

        return answer

    async def _sample(self, asked: Mapping[str, Any], prompts: list[tuple[int, ...]], *, cap: Any) -> list[Rollout]:
        count = _number(asked, "n", int, 1)
        if not 1 <= count * len(prompts) <= MAX_CHOICES:
            raise CapabilityError(f"{len(prompts)} prompts x n = {count} choices; 1 to {MAX_CHOICES} are allowed")
        if type(cap) is not int:
            raise CapabilityError(f"max_tokens must be a whole number, not {cap!r}")
        stop = asked.get("stop") or []
        stop = [stop] if isinstance(stop, str) else stop
        if not isinstance(stop, list) or not all(isinstance(s, str) for s in stop):
            raise CapabilityError(f"stop must be a text or a list of texts, not {stop!r}")
        sampling = Sampling(
            temperature=float(_number(asked, "temperature", (int, float), 1.0)),
            top_p=float(_number(asked, "top_p", (int, float), 1.0)),
            top_k=_number(asked, "top_k", int, 0),
            max_new_tokens=cap,
            stop_token_ids=self.model.stop_token_ids,
            stop_strings=tuple(stop),
        )
        seed = _number(asked, "seed", int, secrets.randbits(53))
        wanted = [
            Sample(prompt_index=i, sample=j, prompt_tokens=prompt, seed=seed, sampling=sampling)
            for i, prompt in enumerate(prompts)
            for j in range(count)
        ]
        return await self.service.desk.generate(wanted, allowed=lambda: self.service.lease.refuse_others(""))

    def _tokens(self, prompt: str | list[int]) -> tuple[int, ...]:
        return tuple(self.model.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)

    def _logprobs(self, rollout: Rollout) -> dict[str, Any]:
        ids = rollout.tokens_R.tolist()
        starts = [len(self.model.tokenizer.decode(ids[:i])) for i in range(len(ids))]
        return {
            "tokens": [self.model.tokenizer.decode([i]) for i in ids],
            "token_ids": ids,
            "token_logprobs": rollout.logp_R.tolist(),
            "top_logprobs": None,
            "text_offset": starts,
        }

    def _chat_logprobs(self, rollout: Rollout) -> list[dict[str, Any]]:
        pairs = zip(rollout.tokens_R.tolist(), rollout.logp_R.tolist(), strict=True)
        out = []
        for token, logp in pairs:
            text = self.model.tokenizer.decode([token])
            out.append(
                {"token": text, "token_id": token, "logprob": logp, "bytes": list(text.encode()), "top_logprobs": []}
            )
        return out

    def _answer(
        self,
        kind: str,
        called: str,
        choices: list[dict[str, Any]],
        prompts: list[tuple[int, ...]],
        rollouts: list[Rollout],
    ) -> dict[str, Any]:
        read, made = sum(map(len, prompts)), sum(len(r.tokens_R) for r in rollouts)
        usage = {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}
        about = {"id": f"{kind}-{secrets.token_hex(12)}", "object": called, "created": int(time.time())}
        return about | {"model": self.model.name, "choices": choices, "usage": usage}


def _refuse_unknown(asked: Mapping[str, Any], known: set[str]) -> None:
    for name, value in asked.items():
        if name in known or (name in _NEUTRAL and (value is None or value == _NEUTRAL[name])):
            continue
        allowed = f"only {_NEUTRAL[name]!r} is" if name in _NEUTRAL else f"it is none of {', '.join(sorted(known))}"
        raise CapabilityError(f"{name} = {value!r:.60} is not supported here: {allowed}")


def _prompts(given: Any) -> list[str | list[int]]:
    """One prompt or many."""
    if isinstance(given, str):
        return [given]
    if isinstance(given, list) and given:
        if all(type(x) is int for x in given):
            return [given]
        if all(isinstance(x, str) or (isinstance(x, list) and all(type(t) is int for t in x)) for x in given):
            return given
    raise CapabilityError("prompt must be a text, a list of token ids, or a list of either")


def _number(asked: Mapping[str, Any], name: str, kinds: type | tuple[type, ...], default: Any) -> Any:
    value = asked.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise CapabilityError(f"{name} must be a number, not {value!r:.60}")
    return value


def _is_message(message: Mapping[str, Any]) -> bool:
    return message.keys() == {"role", "content"} and all(isinstance(v, str) for v in message.values())


def _version(rollout: Rollout) -> int:
    return int(rollout.version_R[0]) if len(rollout.version_R) else -1
