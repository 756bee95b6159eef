"""One thread in front of a sampler: calls one after another, and waiting requests together in one batch.

A completion depends on its request and the weights alone, so who else is in the batch changes nothing but the speed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from onegrid.errors import OnegridError
from onegrid.sampler.base import Sampler
from onegrid.types import Request, Rollout

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Job:
    """What one client has asked for. `allowed` raises where it may not be served any more."""

    requests: list[Request]
    future: asyncio.Future[list[Rollout]]
    allowed: Callable[[], None]


class Desk:
    """Everything that touches the sampler goes through here; its methods belong to one event loop."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sampler")
        self._waiting: list[Job] = []
        self._serving: asyncio.Task[None] | None = None

    async def call(self, function: Callable[[], T]) -> T:
        """`function()` in the sampler's thread, after all calls before it."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    async def generate(self, requests: Sequence[Request], *, allowed: Callable[[], None]) -> list[Rollout]:
        """Rollouts in the order of the requests, computed together with those of others who wait.

        allowed  asked when their turn has come, after which no other call comes before them: a version may have been
                 committed while they waited. What it raises is their answer
        """
        future: asyncio.Future[list[Rollout]] = asyncio.get_running_loop().create_future()
        self._waiting.append(Job(list(requests), future, allowed))
        if self._serving is None:
            self._serving = asyncio.create_task(self._serve())
        return await future

    async def _serve(self) -> None:
        try:
            while self._waiting:
                jobs, self._waiting = [job for job in self._waiting if _still(job)], []
                together = [request for job in jobs for request in job.requests]
                if not jobs:
                    continue
                try:
                    rollouts = await self.call(lambda together=together: self.sampler.generate(together))  # type: ignore[misc]
                except Exception as error:
                    await self._alone(jobs, error)
                    continue
                at = 0
                for job in jobs:
                    _settle(job.future, rollouts[at : at + len(job.requests)])
                    at += len(job.requests)
        finally:
            self._serving = None

    async def _alone(self, jobs: list[Job], error: Exception) -> None:
        """One refused request does not spoil the others: each job by itself."""
        for job in jobs:
            if len(jobs) == 1 or not isinstance(error, OnegridError):
                _settle(job.future, error)
            elif _still(job):
                try:
                    _settle(job.future, await self.call(lambda job=job: self.sampler.generate(job.requests)))  # type: ignore[misc]
                except Exception as own:
                    _settle(job.future, own)

    def close(self) -> None:
        """Ends the thread after what it is at."""
        self._thread.shutdown(wait=True)


def _still(job: Job) -> bool:
    """Whether somebody waits for it who may have it."""
    if job.future.done():  # a client that has gone
        return False
    try:
        job.allowed()
    except OnegridError as error:
        _settle(job.future, error)
        return False
    return True


def _settle(future: asyncio.Future[list[Rollout]], result: list[Rollout] | Exception) -> None:
    if future.done():  # whoever waited has gone
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
