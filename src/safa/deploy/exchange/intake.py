"""From the reply of a client to an update of the model, if the screening accepts it."""

from __future__ import annotations

import logging
import math
from typing import cast

from torch import Tensor

from safa.deploy.exchange.messages import TrainRequest, Update
from safa.deploy.exchange.model_codec import ModelCodec, Tensors
from safa.deploy.exchange.reference import Reference, reference, steps_of
from safa.deploy.exchange.screening import Rejected, RejectReason, Screening
from safa.runs.settings import Settings
from safa.server import Server
from safa.tasks.problem import Problem

__all__ = ["Intake"]

_log = logging.getLogger("safa.deploy")


class Intake:
    """Decodes and screens updates."""

    def __init__(
        self, server: Server, codec: ModelCodec, screening: Screening, settings: Settings, problem: Problem
    ) -> None:
        self._server, self._codec, self._screening = server, codec, screening
        self._settings, self._problem = settings, problem
        self._reference: Reference | None = None

    def update(self, client: int, request: TrainRequest, reply: Update | Rejected) -> Tensor | Rejected:
        """The update as a row, or why it is rejected."""
        if isinstance(reply, Rejected):
            return self._screening.reject(client, reply)
        found = self._screening.admit(
            client,
            size_bytes=reply.size_bytes,
            version=reply.version,
            latest=int(self._server.protocol.versions[client]),
            held=range(request.version + 1),
            asked=reply.attempt == request.attempt,
        )
        if found:
            return found
        if reply.version != request.version:
            why = f"it is based on version {reply.version}; the client was asked to train {request.version}"
            return self._screening.reject(client, Rejected(RejectReason.STALE_VERSION, why))
        return self._decoded(client, request, reply)

    def _decoded(self, client: int, request: TrainRequest, reply: Update) -> Tensor | Rejected:
        base = self._codec.round_trip(self._server.start_model(client, request.version))
        update = self._codec.decode_update(reply.encoded, base)
        found = self._screening.judge(client, update, base, usual=self._usual_norm(client))
        return found or self._codec.row(cast(Tensors, update))

    def _usual_norm(self, client: int) -> float | None:
        """How far an update of this client usually moves the model, where screening cannot know it yet."""
        if self._screening.has_median or math.isinf(self._screening.screen.norm_multiple):
            return None
        if self._reference is None:
            self._reference = reference(self._settings, self._problem)
            _log.info("an update of the server's own has a norm of %.6g", self._reference.norm)
        usual = self._reference.for_steps(steps_of(float(self._server.protocol.sizes[client]), self._settings))
        return usual if 0 < usual < math.inf else None
