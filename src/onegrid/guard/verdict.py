"""What a check says: passed, failed, or could not tell, which counts as failed, with tensors by name and both sides."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from onegrid.errors import CapabilityError, NonFiniteError, SyncError

Status = Literal["passed", "failed", "could not tell"]
METRIC: dict[Status, int] = {"passed": 1, "failed": 0, "could not tell": -1}


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The answer of one check at one moment."""

    check: str
    """Such as "audit" or "digest"; one of `config.CHECKS`."""
    condition: str
    """What it tests, or, where it failed, what is broken: "C1" .. "C7" of the contract."""
    status: Status
    tensors: tuple[str, ...] = ()
    """Canonical names concerned, in forward order."""
    expected: str = ""
    found: str = ""
    where: tuple[str, ...] = ()
    """First differing row and block with both bytes and values, one line a tensor, where the check can see them."""
    cause: str = ""
    """The fault whose signature fits best, in words."""

    @property
    def passed(self) -> bool:
        """False also where the check could not tell."""
        return self.status == "passed"

    @property
    def metric(self) -> int:
        """Value of `guard/<check>`: 1 passed, 0 failed, -1 could not tell."""
        return METRIC[self.status]


class FailedChecks(SyncError):
    """Checks of a synchronization or step that did not pass; the message is the page of the incident."""

    def __init__(self, message: str, verdicts: Sequence[Verdict]) -> None:
        first = verdicts[0]
        super().__init__(message, condition=first.condition, tensors=first.tensors)
        self.verdicts = tuple(verdicts)

    def after(self, first: FailedChecks) -> FailedChecks:
        """This one, with what failed the first time and is not among its own: that is where to look."""
        seen = {(v.check, v.condition) for v in self.verdicts}
        others = tuple(v for v in first.verdicts if (v.check, v.condition) not in seen)
        if others:
            self.add_note(f"the first time it was {', '.join(v.check for v in others)}: {others[0].found}")
        self.verdicts += others
        return self


def passed(check: str, condition: str, *, found: str = "") -> Verdict:
    """Nothing to object to."""
    return Verdict(check=check, condition=condition, status="passed", found=found)


def failed(
    check: str,
    condition: str,
    *,
    expected: str,
    found: str,
    tensors: Iterable[str] = (),
    where: Iterable[str] = (),
    cause: str = "",
) -> Verdict:
    """A difference that the check has seen."""
    return Verdict(
        check=check,
        condition=condition,
        status="failed",
        tensors=tuple(tensors),
        expected=expected,
        found=found,
        where=tuple(where),
        cause=cause,
    )


def could_not_tell(check: str, condition: str, *, expected: str, found: str) -> Verdict:
    """No answer, or one that is not understood."""
    return Verdict(check=check, condition=condition, status="could not tell", expected=expected, found=found)


def closed(check: str, condition: str, examine: Callable[[], Verdict]) -> Verdict:
    """The verdict of `examine`, which fails closed: an exception is never a pass.

    SyncError and NonFiniteError are failures that the other side has seen itself; CapabilityError, and whatever else a
    check meets in an answer that it does not understand, is `could not tell`. Interruptions go on upwards.
    """
    try:
        return examine()
    except FailedChecks:
        raise
    except SyncError as error:
        return failed(check, error.condition, tensors=error.tensors, expected="an answer", found=str(error))
    except NonFiniteError as error:
        return failed(check, "C6", expected="finite numbers", found=str(error))
    except CapabilityError as error:
        return could_not_tell(check, condition, expected="an answer", found=str(error))
    except Exception as error:
        found = f"an answer that is not understood: {type(error).__name__}: {error}"
        return could_not_tell(check, condition, expected="an answer", found=found)


def shorten(names: Iterable[str], limit: int = 6) -> str:
    """The first names, and how many more."""
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
