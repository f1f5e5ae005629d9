"""The device as a Flower client app: it reads a letter, has the device act on it, and writes the answer.

Who the device is stands in the node config of its SuperNode, `--node-config 'name="ann" state="/var/lib/safa"'`:

    name            what it is called, the same at every start
    state           a folder of its own, in which it keeps what it is at work on
    task            the task that it trains; needed where that is one's own (package.module:attribute)
    partition-id    which part of the task's data is its own; without, all of it
    pause-s         so many seconds are added to every order (for trials with stragglers)

Whatever goes wrong is answered with a `Failure` of one sentence. What the device did not expect is told in its own log
alone, because that may say more than is for others to know.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from logging import ERROR, WARNING
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.common.logger import log

from safa.deploy.exchange.device import Device
from safa.deploy.exchange.messages import Failure, Introduction, Missing, Update, read_invitation, read_order, written
from safa.deploy.launcher.watchdog import end_with_parent
from safa.errors import SafaError

__all__ = ["app"]

app = ClientApp()

_Letter = Introduction | Update | Missing | Failure


@app.query()
def introduce(message: Message, context: Context) -> Message:
    """Answer an invitation."""
    return _answered(message, context, lambda device: device.introduce(read_invitation(message.content)))


@app.train()
def work(message: Message, context: Context) -> Message:
    """Answer an order."""
    return _answered(message, context, lambda device: device.work(read_order(message.content)))


def _answered(message: Message, context: Context, act: Callable[[Device], _Letter]) -> Message:
    """The device's answer, whatever happens to it."""
    end_with_parent()
    try:
        letter = act(_device(context.node_config))
    except SafaError as wrong:
        letter = Failure(why=str(wrong))
    except Exception as wrong:
        log(ERROR, "The device failed.", exc_info=True)
        letter = Failure(why=f"the device failed with a {type(wrong).__name__}; its log says more")
    if isinstance(letter, Failure):
        log(WARNING, "To the server: %s", letter.why)
    return Message(written(letter), reply_to=message)


def _device(config: Mapping[str, Any]) -> Device:
    """The device that a node config describes."""
    pause_s = config.get("pause-s", 0.0)
    if isinstance(pause_s, bool) or not isinstance(pause_s, int | float) or not 0 <= pause_s < math.inf:
        raise SafaError(f"pause-s in the node config must be a number of seconds, not {pause_s!r}")
    partition = config.get("partition-id")
    if partition is not None and type(partition) is not int:
        raise SafaError(f"partition-id in the node config must be a whole number, not {partition!r}")
    return Device(
        _text(config, "name"),
        Path(_text(config, "state")),
        task=_text(config, "task") if "task" in config else None,
        partition=partition,
        pause_s=pause_s,
    )


def _text(config: Mapping[str, Any], key: str) -> str:
    """A text that must stand in the node config."""
    if key not in config:
        raise SafaError(f"the node config of the device lacks {key}")
    value = config[key]
    if not isinstance(value, str) or not value:
        raise SafaError(f"{key} in the node config must be text, not {value!r}")
    return value
