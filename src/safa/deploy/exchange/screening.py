"""Screening: whether an update of a client is accepted.

What a client sends never raises an exception here. It is rejected with a `RejectReason` and a sentence for the log, and
a rejection changes nothing but the counters. A client that is rejected too often in a row is blocked until the operator
unblocks it. There are two checks, so that nothing large is decoded for a sender that should not have sent it:

    admit    the sender, the request, the size, the base version; before the update is decoded
    judge    names, shapes, dtypes, finite numbers, the norm of the delta; after it was decoded

**The running median.** An operator can bound the norm of an update's delta by a number (`norm_bound`), by a multiple
of the median of accepted norms (`norm_multiple`), or by both. The median has one vote per client, its latest accepted
norm, over the `window` clients that were accepted last. Sending often gives nobody a second vote. While fewer than half
of the clients in the window are hostile, the median lies between two honest norms, whatever the others send; and no
vote is higher than the bound that was in force when it was cast.

**Before there is a median**, until `warm_up` clients have voted, or while it is 0, the caller's estimate of a usual
norm is used instead. A deployment trains a little itself to have one (`safa.deploy.exchange.reference`).

It protects from updates that are far too large: a diverged client, a wrong unit, a scaled-up attack. It does not
protect

- from a small delta in a harmful direction, such as a backdoor that stays below the bound;
- from an attacker with half of the votes: one who owns many names (see `roster`), or one whose clients fill a `window`
  that is smaller than the fleet because they answer faster than the rest;
- from an update that is `norm_multiple` times too large, or less: one such update can spoil a model, but not by orders
  of magnitude (a client's weight is bounded elsewhere, see `safa.deploy.exchange.membership`);
- where half of the first `warm_up` voters are hostile: the first votes are cast below the bound of the stand-in, and
  can then make the median as large as that;
- from honest norms that grow by more than `norm_multiple` at once (a new learning rate): all are rejected then, and the
  operator has to raise the multiple;
- what the norm leaves out: integer buffers, such as the counters of batch norm.
"""

from __future__ import annotations

import math
import reprlib
import statistics
from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from safa.errors import SafaError

__all__ = ["RejectReason", "Rejected", "Screen", "Screening", "delta_norm", "shown"]


class RejectReason(StrEnum):
    """Why something that a client sent was rejected."""

    UNKNOWN_CLIENT = "unknown client"
    """Nobody of that name or node has enrolled."""
    BLOCKED = "blocked"
    """It was rejected too often in a row before."""
    NOT_ASKED = "not asked"
    """It answers nothing that this client was asked."""
    TOO_LARGE = "too large"
    """It has more bytes than the operator allows."""
    UNKNOWN_VERSION = "unknown version"
    """The server does not hold the model that it is based on."""
    FUTURE_VERSION = "future version"
    """It is based on a version that is not there yet."""
    STALE_VERSION = "stale version"
    """It is based on another version than the one that the client was asked to train."""
    UNREADABLE = "unreadable"
    """Its bytes are not what they claim to be."""
    SHAPES = "shapes"
    """Its tensors have other names or shapes than the model's."""
    DTYPES = "dtypes"
    """Its tensors have other number types than the model's."""
    NOT_FINITE = "not finite"
    """It holds a NaN or an infinite number."""
    NORM = "norm"
    """It is too far from the model that it started from."""
    NAME = "name"
    """The name that was given cannot be used."""
    NAME_TAKEN = "name taken"
    """The name belongs to another node, or the node to another name."""
    SIZE = "size"
    """The size n_k that was declared is not a number above 0 within the operator's bound."""
    DETAILS = "details"
    """What a node said of itself is too long, or not made of plain values."""
    FULL = "full"
    """As many clients have enrolled as the operator allows."""
    EXPELLED = "expelled"
    """The operator has expelled the client."""


class Rejected(NamedTuple):
    """A rejection: the reason to count, and the sentence to log."""

    reason: RejectReason
    why: str


def shown(value: object) -> str:
    """Something that a client sent, short enough and plain enough for a log."""
    try:
        return ascii(reprlib.repr(value))[1:-1] if not isinstance(value, str) else ascii(value[:64])
    except ValueError:  # Python does not print numbers of thousands of digits
        return "a number too long to print"


@dataclass(frozen=True, kw_only=True)
class Screen:
    """What the operator allows."""

    max_bytes: int
    """Bytes of one update."""
    norm_bound: float = math.inf
    """The largest norm of a delta."""
    norm_multiple: float = math.inf
    """The largest norm of a delta in multiples of the running median."""
    window: int = 255
    """K: how many clients have a vote in the median, those that were accepted last; best not below the fleet's size."""
    warm_up: int = 3
    """How many votes the median needs before it binds anyone."""
    rejections_allowed: int = 3
    """N: the client is blocked with its N-th rejection in a row."""

    def __post_init__(self) -> None:
        for name in ("max_bytes", "norm_bound", "norm_multiple", "window", "warm_up", "rejections_allowed"):
            if not getattr(self, name) > 0:
                raise SafaError(f"{name} must be above 0, not {getattr(self, name)}")
        if self.warm_up > self.window:
            raise SafaError(f"warm_up must be at most window ({self.window}), not {self.warm_up}")


class Screening:
    """Judges updates, and remembers what that needs. Clients are known by their number (see `Roster`)."""

    def __init__(self, screen: Screen) -> None:
        self.screen = screen
        self._norms: dict[int, float] = {}  # the votes, oldest first
        self._in_a_row: dict[int, int] = {}
        self._blocked: set[int] = set()
        self._counts: Counter[tuple[int | None, RejectReason]] = Counter()

    # -- the two checks ------------------------------------------------------------------------------------------------

    def admit(
        self, client: int | None, *, size_bytes: int, version: int, latest: int, held: Container[int], asked: bool
    ) -> Rejected | None:
        """Whether an update may be decoded at all.

        `client` is None where the sender is not enrolled; `version` is the base that it claims; `latest` is the newest
        version that it was given; `held` are the versions whose models the server has. `asked` says whether the update
        answers a message that the server sent to this client and that was not answered before. An answer that the
        protocol no longer wants was asked for all the same: being late does not block a client.
        """
        found = self._sender_fault(client, size_bytes, asked) or _version_fault(version, latest, held)
        return found and self.reject(client, found)

    def _sender_fault(self, client: int | None, size_bytes: int, asked: bool) -> Rejected | None:
        if client is None:
            return Rejected(RejectReason.UNKNOWN_CLIENT, "the sender has not enrolled")
        if client in self._blocked:
            return Rejected(RejectReason.BLOCKED, f"client {client} is blocked")
        if not asked:
            return Rejected(RejectReason.NOT_ASKED, "it answers nothing that this client was asked")
        if size_bytes > self.screen.max_bytes:
            return Rejected(RejectReason.TOO_LARGE, f"it has {size_bytes} bytes; {self.screen.max_bytes} are allowed")
        return None

    def judge(
        self,
        client: int,
        update: Mapping[str, NDArray[Any]] | Rejected,
        base: Mapping[str, NDArray[Any]],
        *,
        usual: float | None = None,
    ) -> Rejected | None:
        """Whether an update that was admitted is accepted; `base` is the model that it was trained from.

        `usual` is what the norm of such an update's delta usually is; it is needed while `has_median` is False. What
        `codec.decode` returned can be passed as it is: if that is a rejection, it is counted.
        """
        if isinstance(update, Rejected):
            return self.reject(client, update)
        found = _unlike(update, base) or _not_finite(update)
        norm = math.nan if found else delta_norm(update, base)
        found = found or self._norm_fault(norm, usual)
        if found:
            return self.reject(client, found)
        self._accept(client, norm)
        return None

    def _norm_fault(self, norm: float, usual: float | None) -> Rejected | None:
        limit = self.norm_limit
        if usual is not None and not self.has_median:
            limit = min(limit, self.screen.norm_multiple * usual)
        if norm <= limit and math.isfinite(norm):
            return None
        allowed = f"{limit:.6g} is allowed" if limit < math.inf else "it must be finite"
        return Rejected(RejectReason.NORM, f"the norm of its delta is {norm:.6g}; {allowed}")

    def _accept(self, client: int, norm: float) -> None:
        self._in_a_row.pop(client, None)
        self._norms.pop(client, None)
        self._norms[client] = norm
        if len(self._norms) > self.screen.window:
            del self._norms[next(iter(self._norms))]

    @property
    def norm_limit(self) -> float:
        """The largest norm of a delta that would be accepted now, without a usual norm."""
        screen = self.screen
        return min(screen.norm_bound, screen.norm_multiple * self._median) if self.has_median else screen.norm_bound

    @property
    def has_median(self) -> bool:
        """Whether there is a median that binds. One of 0 says nothing and binds nobody."""
        return self._median > 0

    @property
    def _median(self) -> float:
        return statistics.median(self._norms.values()) if len(self._norms) >= self.screen.warm_up else 0.0

    # -- the counters ------------------------------------------------------------------------------------------------

    def reject(self, client: int | None, rejected: Rejected) -> Rejected:
        """Count a rejection, also one that was found elsewhere, and block the client after too many."""
        self._counts[client, rejected.reason] += 1
        if client is not None and client not in self._blocked:
            self._in_a_row[client] = self._in_a_row.get(client, 0) + 1
            if self._in_a_row[client] >= self.screen.rejections_allowed:
                self._blocked.add(client)
        return rejected

    def unblock(self, client: int) -> None:
        """Let a client that was blocked take part again. What was counted stays counted."""
        self._blocked.discard(client)
        self._in_a_row.pop(client, None)

    def forget(self, client: int) -> None:
        """Remove the vote of a client that was expelled. What was counted stays counted."""
        self._norms.pop(client, None)
        self._in_a_row.pop(client, None)

    @property
    def blocked(self) -> list[int]:
        """The clients that are blocked, by number."""
        return sorted(self._blocked)

    @property
    def counts(self) -> dict[RejectReason, int]:
        """How often each reason was given."""
        total: Counter[RejectReason] = Counter()
        for (_, reason), count in self._counts.items():
            total[reason] += count
        return dict(sorted(total.items()))

    @property
    def counts_by_client(self) -> dict[int, int]:
        """How many updates of each client were rejected, where there were any."""
        total: Counter[int] = Counter()
        for (client, _), count in self._counts.items():
            if client is not None:
                total[client] += count
        return dict(total)

    def counts_of(self, client: int) -> dict[RejectReason, int]:
        """How often each reason was given to one client."""
        return {reason: n for reason in RejectReason if (n := self._counts[client, reason])}

    # -- the state, as a whole ---------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """Everything that it remembers, as plain JSON-able values."""
        return {
            "norms": [[client, norm] for client, norm in self._norms.items()],
            "in_a_row": [[client, count] for client, count in self._in_a_row.items()],
            "blocked": self.blocked,
            "counts": [[client, str(reason), count] for (client, reason), count in self._counts.items()],
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Restore a snapshot; a window that has become smaller keeps the latest votes."""
        try:
            norms = dict(snapshot["norms"][-self.screen.window :])
            in_a_row, blocked = dict(snapshot["in_a_row"]), set(snapshot["blocked"])
            counts = Counter({(client, RejectReason(reason)): count for client, reason, count in snapshot["counts"]})
        except (KeyError, TypeError, ValueError):
            raise SafaError("this is not a snapshot of a screening") from None
        self._norms, self._in_a_row, self._blocked, self._counts = norms, in_a_row, blocked, counts


def _version_fault(version: int, latest: int, held: Container[int]) -> Rejected | None:
    if type(version) is int and version > latest:
        return Rejected(
            RejectReason.FUTURE_VERSION, f"it claims version {shown(version)}; the client was given {latest}"
        )
    if type(version) is not int or version not in held:
        return Rejected(RejectReason.UNKNOWN_VERSION, f"the server holds no version {shown(version)}")
    return None


def _unlike(update: Mapping[str, NDArray[Any]], base: Mapping[str, NDArray[Any]]) -> Rejected | None:
    if update.keys() != base.keys():
        return Rejected(RejectReason.SHAPES, "its tensors have other names than the model's")
    for name, tensor in base.items():
        if update[name].shape != tensor.shape:
            return Rejected(RejectReason.SHAPES, f"{name} is {update[name].shape}; the model has {tensor.shape}")
        if update[name].dtype != tensor.dtype:
            return Rejected(RejectReason.DTYPES, f"{name} is {update[name].dtype}; the model has {tensor.dtype}")
    return None


def _not_finite(update: Mapping[str, NDArray[Any]]) -> Rejected | None:
    for name, tensor in update.items():
        if not np.isfinite(tensor).all():
            return Rejected(RejectReason.NOT_FINITE, f"{name} holds a NaN or an infinite number")
    return None


def delta_norm(update: Mapping[str, NDArray[Any]], base: Mapping[str, NDArray[Any]]) -> float:
    """The Euclidean norm of update - base over all floating-point tensors, added up in float64."""
    floating = [name for name, tensor in base.items() if np.issubdtype(tensor.dtype, np.floating)]
    with np.errstate(over="ignore"):
        deltas = (np.subtract(update[name], base[name], dtype=np.float64) for name in floating)
        return math.hypot(*(float(np.linalg.norm(delta)) for delta in deltas))
