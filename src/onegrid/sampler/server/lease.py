"""Who may change the weights of a served sampler: one client at a time, from `begin` until it accepts what it sent.

Between a commit and its sender's own proof nobody else is served with the new version; a sender that goes away before
it has accepted the version loses it, and the version before serves on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from onegrid.errors import SyncError


class Lease:
    """Not thread-safe: everything is called from the server's event loop.

    seconds  without a call of its holder after which a lease has lapsed
    clock    monotonic seconds
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self.clock = seconds, clock
        self.holder: str | None = None
        self.unaccepted = False
        """A version is live that its sender has not accepted yet."""
        self._until = 0.0
        self._calls = 0

    @property
    def lapsed(self) -> bool:
        """Whether a holder has been silent for too long; one that waits for an answer is not silent."""
        return self.holder is not None and not self._calls and self.clock() >= self._until

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """The sampler works for the holder inside, however long it takes."""
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            self._until = self.clock() + self.seconds

    def take(self, client: str) -> None:
        """Makes `client` the holder. SyncError C5 while somebody else is, and for one without a name."""
        if not client:
            raise SyncError(
                "whoever updates the weights must say who it is: send an x-onegrid-client header", condition="C5"
            )
        if self.holder not in (None, client):
            raise SyncError(
                f"another client is updating the weights; it has them until it is done or silent for "
                f"{self.seconds:.0f} s. Wait, or give this learner a sampler of its own",
                condition="C5",
            )
        self.holder = client
        self.renew(client)

    def check(self, client: str) -> None:
        """SyncError C5 unless `client` is the holder."""
        if self.holder != client:
            raise SyncError(
                "no update of this client is open: it was never begun, lapsed, or the server was restarted; begin anew",
                condition="C5",
            )
        self.renew(client)

    def renew(self, client: str) -> None:
        """Counts the silence of the holder from now on."""
        if self.holder == client:
            self._until = self.clock() + self.seconds

    def accept(self, client: str) -> None:
        """The holder stands by what it sent: everybody may be served with it."""
        if self.holder == client:
            self.release()

    def release(self) -> None:
        """Nobody is updating."""
        self.holder, self.unaccepted = None, False

    def refuse_others(self, client: str) -> None:
        """SyncError C7 for whoever would be served with a version that its sender has not accepted."""
        if self.unaccepted and self.holder != client:
            raise SyncError("new weights are live and not proved yet by their sender; try again", condition="C7")
