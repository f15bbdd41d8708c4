"""Checkpoints: what a folder holds, its manifest, and resuming a run from it.

May be imported from here: what __all__ lists; none of it needs torch. Writing and reading the tensors is in
`checkpointing.torch_dist`, which needs Megatron and is imported by its name.
"""

from megatron_dapo.checkpointing.folders import (
    CONTROLLER_STATE,
    TRAINER_STATE,
    discard,
    newest_first,
    publish,
    read_controller_state,
    read_trainer_state,
    staging,
    step_of,
)
from megatron_dapo.checkpointing.manifest import MANIFEST, Manifest, Verdict, read_manifest, verify, write_manifest
from megatron_dapo.checkpointing.rollout_state import num_groups_under_way
from megatron_dapo.checkpointing.stop_signals import StopSignals
from megatron_dapo.config.model_folder import HF, MEGATRON

__all__ = [
    "CONTROLLER_STATE",
    "HF",
    "MANIFEST",
    "MEGATRON",
    "TRAINER_STATE",
    "Manifest",
    "StopSignals",
    "Verdict",
    "discard",
    "newest_first",
    "num_groups_under_way",
    "publish",
    "read_controller_state",
    "read_manifest",
    "read_trainer_state",
    "staging",
    "step_of",
    "verify",
    "write_manifest",
]
