"""The protocols, as pure state machines: numpy only, no clock, no random number, no file, no model.

Read `safa` (the rules of the paper) first, then `machine` (the mechanism that all share) and `events` (what goes in
and out). Every other protocol is one small file.
"""

from safa.protocol.events import Dispatch, Events, Receipt
from safa.protocol.fedasync import FedAsync
from safa.protocol.fedavg import FedAvg
from safa.protocol.fedbuff import FedBuff
from safa.protocol.fedcompass import FedCompass
from safa.protocol.fedcs import FedCS
from safa.protocol.fedsecant import FedSecant
from safa.protocol.local import Local
from safa.protocol.machine import Protocol, quota_of
from safa.protocol.registry import available, build, find
from safa.protocol.safa import Safa
from safa.protocol.timelyfl import TimelyFL

__all__ = [
    "Dispatch",
    "Events",
    "FedAsync",
    "FedAvg",
    "FedBuff",
    "FedCS",
    "FedCompass",
    "FedSecant",
    "Local",
    "Protocol",
    "Receipt",
    "Safa",
    "TimelyFL",
    "available",
    "build",
    "find",
    "quota_of",
]
