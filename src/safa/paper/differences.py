"""Known differences from the paper, and why cells are outside their tolerance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from safa.paper.tables import Comparison

__all__ = ["DIFFERENCES", "EXCEPTIONS", "Exceptions", "sort_out"]

DIFFERENCES = (
    "A printed figure is one run in one random world, drawn anew for every cell and not known. Measured figures are "
    "over many worlds, the same ones in every cell.",
    "The tables call a client deprecated when (t-1) - v > 5, which is Eq. 3 with tau = 6. Runs as printed use 6, "
    "corrected ones Eq. 3 with tau = 5.",
    "T_dist is printed from the copies sent since round 1, so that its mean over r rounds is (r+1)/2 times Eq. 19.",
    "FedAvg and FedCS are printed with an average over all clients, the old global model standing in for those that "
    "did not commit, which damps their steps. Corrected runs average over the participants, as McMahan does.",
    "As printed, the best model so far by test loss replaces the aggregate before it is sent out. Corrected runs do "
    "not look at the test set; their accuracy is that of the last model.",
    "SR of FedAvg and FedCS is printed for C, though ceil(C*m)/m of the clients are asked. Measured ones are scaled "
    "alike (it matters for the five clients of Task 1 only).",
    "FedCS waits for all whom it selected, crashed or not, and is charged with the work of clients that it drew and "
    "left out, though they never worked. Both are read off its printed tables; the text says neither.",
    "Task 1 uses the first 12 features (LSTAT is left out); its accuracy counts 0/0 as exact. Task 2 takes pixels "
    "from 0 to 255. Task 3 has 186,479 rows, one fewer than the paper says.",
    "The printed round lengths of Task 1 are longer than its world as described gives: most of them are among the "
    "slowest tenth of the worlds. They fit fleets whose slowest client makes 0.05 to 0.13 mini-batches a second, "
    "bounds that were picked by looking at the printed figures; 24 of the fleets of seeds 0 to 85 are like that. By "
    "which rule they came to be is not known.",
    "Choices that were made with results in sight: the tolerance by the spread of worlds and their number (with the "
    "first five worlds alone, most round lengths of SAFA and FedCS in Task 1 would be outside), the charge on FedCS "
    "(it was found by fitting printed cells, so that those are no test of it), the targets and that they must be "
    "held for five rounds, and the rules for the claims.",
    "In the table of who is first, each protocol has its best C by the very runs that are shown, and Task 2 is one "
    "world; small differences there mean little.",
    "Task 1 is tested on the last 30% of the file. Its test loss has a minimum early in training and rises again, so "
    "that without a look at the test set the protocol that learns more per round is behind after 100 rounds. That, "
    "and not a better model, is why SAFA's last model is ahead there.",
    "An accuracy of Task 3 says little before training has settled: a model of one round may have 0.99 and lose it "
    "again. A target counts as reached only when it was held.",
    "The paper's figures come without numbers; Figures 3 to 8 are drawn in their likeness, not compared by number.",
)
"""What is to be known before any figure here is held against one there."""


@dataclass(frozen=True)
class Exceptions:
    """A class of cells that are outside their tolerance for one reason."""

    what: str
    why: str
    covers: Callable[[Comparison], bool]


def _is(task: str, protocol: str, *metrics: str) -> Callable[[Comparison], bool]:
    return lambda one: one.cell[:2] == (task, protocol) and one.cell[2] in metrics


EXCEPTIONS = (
    Exceptions(
        "round lengths of FedAvg, Task 1, cr = 0.5 and 0.7",
        "In all other rows FedAvg's server waits until T_lim when a selected client has crashed. These rows are "
        "FedCS's, to the digit at C = 0.7 and 1.0 (cr = 0.5) and at C = 1.0 (cr = 0.7): nobody was waited for.",
        lambda one: _is("boston", "fedavg", "round_length_s")(one) and one.cell[3] >= 0.5,
    ),
    Exceptions(
        "round lengths of SAFA, Task 3, C = 1.0",
        "They are printed as T_lim plus T_dist to the digit at every crash rate (1620.00 s and T_dist), as if "
        "somebody had always been waited for; with the rule that gives all other cells they are shorter. Task 2 does "
        "not show it.",
        lambda one: _is("kdd99", "safa", "round_length_s")(one) and one.cell[4] == 1.0,
    ),
    Exceptions(
        "SR of FedCS, Task 1, C = 0.7, where it left a client out",
        "Printed 0.648 and 0.644 are copies over clients; the cells in which nobody was left out print C instead. "
        "Measured ones are scaled to C throughout.",
        lambda one: _is("boston", "fedcs", "sync_ratio")(one) and one.cell[4] == 0.7,
    ),
    Exceptions(
        "round lengths of SAFA and FedCS, Task 1",
        "The fleets behind the printed figures all have a straggler; see the known differences.",
        lambda one: one.cell[0] == "boston" and one.cell[1] in ("safa", "fedcs") and one.cell[2] == "round_length_s",
    ),
    Exceptions(
        "SR and T_dist of SAFA, Task 1, cr = 0.5, C = 0.5",
        "One run, two tables: 0.470 where the neighbouring cells, which have the same law, print 0.498 to 0.536. "
        "Five clients and a hundred rounds leave that much to chance.",
        lambda one: _is("boston", "safa", "sync_ratio", "t_dist_s")(one) and one.cell[3:] == (0.5, 0.5),
    ),
    Exceptions(
        "accuracies of FedAvg, FedCS and fully local training, Task 1, C = 0.1 and 0.3",
        "One or two clients of five are drawn per round, and a step is damped to their share: which ones, and how "
        "often they crash, decides how far 100 rounds get. At cr = 0.5, C = 0.3 all three are low in the same "
        "unknown world.",
        lambda one: one.cell[0] == "boston" and one.cell[2] == "best_accuracy" and one.cell[4] <= 0.3,
    ),
    Exceptions(
        "accuracies of fully local training, Task 3, C up to 0.5",
        "The average of models that were trained apart gets worse with every local epoch, since many shards hold one "
        "class only. The printed ones are what fewer epochs give: with 2 instead of 5, cr = 0.1, 0.5 and 0.7 at C = "
        "0.1 come to 0.754, 0.874 and 0.925, and cr = 0.7 at C = 0.3 to 0.785 (`safa run kdd99 --preset paper "
        "--protocol local --epochs 2`). Whether less was trained there is not known.",
        lambda one: _is("kdd99", "local", "best_accuracy")(one) and one.cell[4] <= 0.5,
    ),
    Exceptions(
        "single accuracies of FedCS and fully local training, Task 2",
        "They stand out of their own rows in print: FedCS, cr = 0.5, has 0.9321 at C = 1.0 after 0.9699 at C = 0.7; "
        "fully local training, cr = 0.3, has at C = 0.7 the very 0.8909 that it has at C = 0.1. FedCS, cr = 0.7, C = "
        "0.1 is printed 0.014 above FedAvg, which draws the same ten clients.",
        lambda one: one.cell[0] == "mnist" and one.cell[1] in ("fedcs", "local") and one.cell[2] == "best_accuracy",
    ),
)
"""The classes of exceptions, each with its reason."""


def sort_out(outside: Sequence[Comparison]) -> tuple[dict[str, list[Comparison]], list[Comparison]]:
    """Cells outside their tolerance by the class that covers them, and those that none covers."""
    classes: dict[str, list[Comparison]] = {}
    left = []
    for one in outside:
        found = next((each for each in EXCEPTIONS if each.covers(one)), None)
        if found is None:
            left.append(one)
        else:
            classes.setdefault(found.what, []).append(one)
    return classes, left
