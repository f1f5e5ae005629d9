"""The device as a Flower client app: it reads a message, lets the device process it, and sends the reply.

Who the device is stands in the node config of its SuperNode, `--node-config 'name="ann" state="/var/lib/safa"'`:

    name            its name, the same at every start
    state           a folder of its own, in which it keeps the training in progress
    task            the task that it trains; needed for one of your own (package.module:attribute)
    partition-id    which part of the task's data is its own; without, all of it
    pause-s         seconds to be added to every request (for trials with stragglers)

Every error is answered with a `Failure` of one sentence. Details of unexpected errors are written to the log of the
device only: they may contain what the server must not learn.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from safa.deploy.exchange.device import Device
from safa.deploy.exchange.messages import Failure, JoinReply, ModelMissing, Update
from safa.deploy.flower.internals import check_flower
from safa.deploy.flower.records import read_join_request, read_train_request, to_records
from safa.deploy.flower.watchdog import end_with_parent
from safa.errors import SafaError

__all__ = ["app"]

_log = logging.getLogger("flwr")

app = ClientApp()

_Reply = JoinReply | Update | ModelMissing | Failure


@app.query()
def join(message: Message, context: Context) -> Message:
    """Reply to a JoinRequest."""
    return _answered(message, context, lambda device: device.join(read_join_request(message.content)))


@app.train()
def train(message: Message, context: Context) -> Message:
    """Reply to a TrainRequest."""
    return _answered(message, context, lambda device: device.train(read_train_request(message.content)))


def _answered(message: Message, context: Context, act: Callable[[Device], _Reply]) -> Message:
    """The device's reply, whatever happens."""
    end_with_parent()
    try:
        check_flower()
        reply = act(_device(context.node_config))
    except SafaError as error:
        reply = Failure(why=str(error))
    except Exception as error:
        _log.exception("The device failed.")
        reply = Failure(why=f"the device failed with a {type(error).__name__}; see its log")
    if isinstance(reply, Failure):
        _log.warning("To the server: %s", reply.why)
    return Message(to_records(reply), reply_to=message)


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
    """A text that the node config must contain."""
    if key not in config:
        raise SafaError(f"the node config of the device lacks {key}")
    value = config[key]
    if not isinstance(value, str) or not value:
        raise SafaError(f"{key} in the node config must be text, not {value!r}")
    return value
