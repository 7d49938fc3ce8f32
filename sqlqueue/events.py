"""
The events that `Queue.on` listens to; a base class stands for all events below it.

    Event
    ├── JobEvent
    │   ├── JobPushing  JobPushed  JobCommitted
    │   └── DeliveryEvent
    │       ├── JobProcessing  JobTimedOut  JobAttempted
    │       └── FinalEvent
    │           └── JobProcessed  JobRetrying  JobReleased  JobFailed  JobDiscarded  JobSettlementLost
    └── WorkerEvent
        └── WorkerStarting  WorkerLooping  WorkerStopping  WorkerInterrupted
"""

from __future__ import annotations

from ._events import (
    DeliveryEvent,
    Event,
    FinalEvent,
    JobAttempted,
    JobCommitted,
    JobDiscarded,
    JobEvent,
    JobFailed,
    JobProcessed,
    JobProcessing,
    JobPushed,
    JobPushing,
    JobReleased,
    JobRetrying,
    JobSettlementLost,
    JobTimedOut,
    WorkerEvent,
    WorkerInterrupted,
    WorkerLooping,
    WorkerStarting,
    WorkerStopping,
)

__all__ = [
    "DeliveryEvent",
    "Event",
    "FinalEvent",
    "JobAttempted",
    "JobCommitted",
    "JobDiscarded",
    "JobEvent",
    "JobFailed",
    "JobProcessed",
    "JobProcessing",
    "JobPushed",
    "JobPushing",
    "JobReleased",
    "JobRetrying",
    "JobSettlementLost",
    "JobTimedOut",
    "WorkerEvent",
    "WorkerInterrupted",
    "WorkerLooping",
    "WorkerStarting",
    "WorkerStopping",
]
