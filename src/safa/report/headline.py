"""The four numbers that a run's page opens with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from safa.analysis import higher_is_better
from safa.report.clients import Clients
from safa.report.page import Fact, Headline
from safa.report.words import capital, counted, duration, goal, number, percent, some_of
from safa.runs.settings import Settings

__all__ = ["headline"]


def headline(settings: Settings, values: Mapping[str, Any], clients: Clients, *, finished: bool) -> Headline:
    """How good, how long, how much was wasted, who was left out."""
    time = _time(settings, values, finished)
    return Headline([_quality(settings, values), time, _wasted(values), _left_out(clients)])


def _quality(settings: Settings, values: Mapping[str, Any]) -> Fact:
    """The main metric of the last model."""
    main = next(iter(settings.metrics), "loss")
    last, best = values.get(f"last_{main}"), values.get(f"best_{main}")
    if last is None:
        why = "not evaluated yet" if settings.train else "no model was trained"
        return Fact(capital(main), "\N{EN DASH}", why)
    extreme = "highest" if higher_is_better(main, settings.metrics) else "lowest"
    said = f"of the last model on the test set; the {extreme} was {number(best)}"
    return Fact(capital(main), number(last) or "not finite", said, f"last_{main}")


def _time(settings: Settings, values: Mapping[str, Any], finished: bool) -> Fact:
    """The time to the target; that of all rounds where there is no target."""
    target, length = settings.target, values["round_length_s"]
    whole = duration(values["virtual_time_s"])
    if target is None:
        return Fact("Time", whole, f"{duration(length)} a round; no target was set", "virtual_time_s")
    if values["time_to_target_s"] is None:
        so_far = "not reached" if finished else "not yet"
        return Fact("Time to target", so_far, f"{goal(target)}, not within {whole}", "time_to_target_s")
    said = f"{goal(target)}, reached in round {values['rounds_to_target']:,}"
    return Fact("Time to target", duration(values["time_to_target_s"]), said, "time_to_target_s")


def _wasted(values: Mapping[str, Any]) -> Fact:
    refused = values["refused"]
    said = "of what the clients computed; " + (
        f"{counted(refused, 'update')} refused" if refused else "no update refused"
    )
    return Fact("Work thrown away", percent(values["futility"]), said, "futility")


def _left_out(clients: Clients) -> Fact:
    """Who never reached the global model, the slowest first."""
    count = len(clients.merged)
    never = [client for client in clients.order[::-1].tolist() if clients.merged[client] == 0]
    said = "every client reached the model"
    if never:
        names = some_of([clients.names[client] for client in never])
        said = f"never reached the model: client{'s' * (len(never) > 1)} {names}"
    if len(never) > 4 and clients.speeds is not None:
        slow = len(set(never) & set(clients.order[count // 2 :].tolist()))
        said += f"; {'all' if slow == len(never) else f'{slow:,}'} in the slower half"
    return Fact("Clients left out", f"{len(never):,} of {count:,}", said, "starved")
