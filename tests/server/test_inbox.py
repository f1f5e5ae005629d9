"""Updates that were received wait in an inbox: each is given away once, and what it overtook is dropped."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from safa.errors import MisuseError, SafaError
from safa.server.inbox import Inbox
from tests.aggregation.steps import ids

SIZE = 8
START = torch.zeros(SIZE, dtype=torch.float64)
ROOMS = pytest.mark.parametrize("memory_mb", [0.0, 2 * SIZE * 8 / 2**20, 64.0], ids=["files", "both", "memory"])


def put(inbox: Inbox, *updates: tuple[int, int, float]) -> None:
    """Updates by client, base version and the value of all their numbers."""
    for client, base, value in updates:
        inbox.put(client, base, torch.full((SIZE,), value, dtype=torch.float64))


def asked(inbox: Inbox, clients: Sequence[int], bases: Sequence[int]) -> list[float]:
    start = START.expand(len(clients), -1)
    rows: Tensor = inbox.updates(ids(clients), ids(bases), start, rounds=ids(bases), work=np.ones(len(clients)))
    assert rows.shape == (len(clients), SIZE)
    assert torch.equal(rows, rows[:, :1].expand(-1, SIZE))
    return rows[:, 0].tolist()


def resumed(inbox: Inbox) -> Inbox:
    """A new one that continues from what the other holds."""
    new, old = Inbox(START, memory_mb=64.0), inbox.tables()["inbox"]
    new.tables()["inbox"].restore(old.numbers, old.get(old.numbers))
    new.restore(inbox.state())
    return new


@ROOMS
def test_an_update_is_given_away_and_what_it_overtook_is_dropped(memory_mb: float) -> None:
    inbox = Inbox(START, memory_mb=memory_mb)
    put(inbox, (0, 1, 1.0), (0, 2, 2.0), (0, 2, 3.0), (0, 4, 4.0), (7, 2, 5.0))
    assert asked(inbox, [0, 7, 0], [2, 2, 2]) == [2.0, 5.0, 3.0]
    assert len(inbox) == 1
    assert asked(inbox, [0], [4]) == [4.0]
    assert len(inbox) == 0
    with pytest.raises(MisuseError, match="no update of client 0 from version 4 was kept"):
        asked(inbox, [0], [4])


@ROOMS
def test_an_update_that_will_never_be_asked_for_leaves_nothing(memory_mb: float) -> None:
    inbox = Inbox(START, memory_mb=memory_mb)
    put(inbox, (0, 1, 1.0), (0, 2, 2.0), (0, 2, 3.0), (3, 2, 4.0))
    inbox.discard(ids([0, 3]), ids([2, 2]))  # with the one from version 1, which was overtaken
    assert len(inbox) == 1
    assert asked(inbox, [0], [2]) == [3.0]
    with pytest.raises(MisuseError, match="no update of client 3 from version 2 was kept"):
        inbox.discard(ids([3]), ids([2]))
    assert len(inbox) == 0
    inbox.discard(ids([]), ids([]))


def test_an_update_is_copied_and_must_fit_the_model() -> None:
    inbox = Inbox(START, memory_mb=1.0)
    row = torch.ones(SIZE, dtype=torch.float64)
    inbox.put(0, 0, row)
    row += math.nan
    assert asked(inbox, [0], [0]) == [1.0]
    for wrong in (torch.ones(SIZE + 1), torch.ones(1, SIZE)):
        with pytest.raises(SafaError, match=r"has 8 numbers, not shape"):
            inbox.put(0, 0, wrong)
    assert len(inbox) == 0


def test_updates_come_in_the_type_of_the_model() -> None:
    inbox = Inbox(START.float(), memory_mb=1.0)
    inbox.put(0, 0, torch.full((SIZE,), 0.5, dtype=torch.float64))
    rows = inbox.updates(ids([0]), ids([0]), START.float().unsqueeze(0), rounds=ids([1]), work=np.ones(1))
    assert rows.dtype == torch.float32


@pytest.mark.parametrize("seed", range(5))
def test_an_inbox_continues_as_if_it_had_not_been_stopped(seed: int) -> None:
    """Beside a list of what came in; rooms of updates that were given away are used again."""
    rng = np.random.default_rng(seed)
    inbox, waiting = Inbox(START, memory_mb=3 * SIZE * 8 / 2**20), list[tuple[int, int, float]]()
    for number in range(120):
        if waiting and rng.random() < 0.5:
            client = int(rng.choice([client for client, _, _ in waiting]))
            mine = [update for update in waiting if update[0] == client]
            chosen = mine[rng.integers(len(mine))]
            first = next(place for place, update in enumerate(mine) if update[1] == chosen[1])
            waiting = [update for update in waiting if update not in mine[: first + 1]]
            if rng.random() < 0.5:
                assert asked(inbox, [client], [chosen[1]]) == [mine[first][2]]
            else:
                inbox.discard(ids([client]), ids([chosen[1]]))
        else:
            waiting.append((int(rng.integers(4)), int(rng.integers(number // 10 + 1)), float(number)))
            put(inbox, waiting[-1])
        if rng.random() < 0.2:
            inbox = resumed(inbox)
        assert len(inbox) == len(waiting)
    most = int(inbox.tables()["inbox"].numbers.max(initial=0))
    assert most < 120 / 2, "the numbers of updates that were given away are not used again"
    for client, base, value in waiting:
        assert asked(inbox, [client], [base]) == [value]


def test_nothing_is_trained_here() -> None:
    assert Inbox(START, memory_mb=1.0).train is None
