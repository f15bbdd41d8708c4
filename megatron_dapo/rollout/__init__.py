"""Rollout: the SGLang client, the supervisor of servers, the controller that fills rollout steps, the trainer's handle.

Import from here.
"""

from megatron_dapo.rollout.batch_files import read_batch, write_batch
from megatron_dapo.rollout.child_process import ChildProcess
from megatron_dapo.rollout.client import (
    FOREIGN_VERSION,
    Generation,
    KeyRefused,
    SamplingParams,
    ServerError,
    SGLangClient,
)
from megatron_dapo.rollout.errors import ForeignSamples, Interrupted, NeedsSync, RolloutError
from megatron_dapo.rollout.handle import RolloutHandle
from megatron_dapo.rollout.replay import Replay, start_rollout
from megatron_dapo.rollout.server_list import ServerList
from megatron_dapo.rollout.server_watch import report_unresponsive
from megatron_dapo.rollout.supervisor import (
    ReservedPort,
    ServerCommand,
    ServerFailure,
    ServerSupervisor,
    sglang_command,
    visible_gpus,
)

__all__ = [
    "FOREIGN_VERSION",
    "ChildProcess",
    "ForeignSamples",
    "Generation",
    "Interrupted",
    "KeyRefused",
    "NeedsSync",
    "Replay",
    "ReservedPort",
    "RolloutError",
    "RolloutHandle",
    "SGLangClient",
    "SamplingParams",
    "ServerCommand",
    "ServerError",
    "ServerFailure",
    "ServerList",
    "ServerSupervisor",
    "read_batch",
    "report_unresponsive",
    "sglang_command",
    "start_rollout",
    "visible_gpus",
    "write_batch",
]
