"""Megatron models of Hugging Face checkpoints: building, the log-prob head, and the weight maps.

What may be imported from here is listed in __all__.
"""

from megatron_dapo.platform import prepare_megatron

prepare_megatron()  # everything below imports megatron.core, which must not come first

from megatron_dapo.config import ModelSpec, read_model_spec  # noqa: E402
from megatron_dapo.models.build import ModelParts, build_model  # noqa: E402
from megatron_dapo.models.file_plan import FilePlan  # noqa: E402
from megatron_dapo.models.hf_io import (  # noqa: E402
    check_hf_weights,
    copy_companions,
    export_hf,
    exportable,
    load_hf_weights,
)
from megatron_dapo.models.log_prob_head import HeadTask, LogProbHead  # noqa: E402
from megatron_dapo.models.safetensors_files import SafetensorsFolder, TensorSpec  # noqa: E402
from megatron_dapo.models.value_head import VALUE_HEAD_PREFIX  # noqa: E402
from megatron_dapo.models.weight_map import hf_tensors  # noqa: E402
from megatron_dapo.models.weight_source import WeightSource  # noqa: E402

__all__ = [
    "VALUE_HEAD_PREFIX",
    "FilePlan",
    "HeadTask",
    "LogProbHead",
    "ModelParts",
    "ModelSpec",
    "SafetensorsFolder",
    "TensorSpec",
    "WeightSource",
    "build_model",
    "check_hf_weights",
    "copy_companions",
    "export_hf",
    "exportable",
    "hf_tensors",
    "load_hf_weights",
    "read_model_spec",
]
