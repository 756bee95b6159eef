"""What another engine answered to a request, as a rollout."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from onegrid.errors import NonFiniteError
from onegrid.sampler.stops import DecodeText, text_of
from onegrid.types import Request, Rollout


def rollout_of(
    request: Request, tokens: Sequence[int], logps: Sequence[float], *, version: int, decode_text: DecodeText | None
) -> Rollout:
    """A rollout whose tokens are all of one version; it stopped if its last token is a stop token of the request.

    tokens  ids of the response
    logps   their log-probabilities in nats, rounded to FP32
    Raises NonFiniteError naming the first token whose log-probability is NaN or infinite.
    """
    logp_R = torch.tensor(logps, dtype=torch.float32)
    finite_R = torch.isfinite(logp_R)
    if not bool(finite_R.all()):
        at = int((~finite_R).nonzero()[0, 0])
        raise NonFiniteError(
            f"the log-probability of prompt {request.prompt_index}, sample {request.sample}, response token {at} "
            f"is {logps[at]}, weights of version {version}"
        )
    finish = "stop" if tokens and tokens[-1] in request.sampling.stop_token_ids else "length"
    return Rollout(
        request=request,
        tokens_R=torch.tensor(tokens, dtype=torch.int64),
        logp_R=logp_R,
        version_R=torch.full((len(tokens),), version, dtype=torch.int64),
        finish=finish,
        text=text_of(tokens, finish, request.sampling, decode_text),
    )
