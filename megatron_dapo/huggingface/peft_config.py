"""adapter_config.json of a PEFT folder: writing one, and understanding another's."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_dapo.common.bounded import read_json
from megatron_dapo.huggingface.lora_settings import LoraSettings

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
# fields with an effect on the computation: they must be absent, empty or false
_REFUSED = (
    "use_dora",
    "use_rslora",
    "lora_bias",
    "fan_in_fan_out",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "layers_to_transform",
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
    "use_qalora",
    "use_bdlora",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "velora_config",
    "monteclora_config",
)
# Values of init_lora_weights for changed weights of the base model.
_OTHER_BASE = ("pissa", "olora", "corda", "loftq")


def adapter_config_json(lora: LoraSettings, modules: Sequence[str], base_model: str) -> str:
    """Return the file's content.

    modules: last names of the modules with an adapter. base_model: path of their model.
    """
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(modules),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    return json.dumps(content, indent=2) + "\n"


def adapter_faults(folder: str, lora: LoraSettings, modules: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (last name of the key, fault) for the folder's adapter_config.json.

    A fault is the end of a sentence: the reason why key and file do not go together. modules: last
    names of the modules with an adapter.
    """
    path = Path(folder)
    try:
        content = read_json(path / ADAPTER_CONFIG)
    except (OSError, ValueError):
        yield (
            "lora_adapter_path",
            f"{folder}, which has no readable {ADAPTER_CONFIG}; give the folder of a PEFT adapter.",
        )
        return
    if not isinstance(content, dict) or content.get("peft_type") != "LORA":
        yield "lora_adapter_path", f"{folder}, whose {ADAPTER_CONFIG} is not of a LoRA adapter; give one that is."
        return
    if not (path / ADAPTER_WEIGHTS).is_file():
        yield "lora_adapter_path", f"{folder}, which has no {ADAPTER_WEIGHTS}; copy the file there."
    refused = [name for name in _REFUSED if content.get(name)]
    refused += ["bias"] if content.get("bias", "none") != "none" else []
    refused += ["init_lora_weights"] if str(content.get("init_lora_weights")).startswith(_OTHER_BASE) else []
    if refused:
        shown = ", ".join(f"{name} {json.dumps(content[name])}" for name in refused)
        yield "lora_adapter_path", f"{folder}, whose {ADAPTER_CONFIG} has {shown}, which is not supported."
    there = {
        "lora_rank": content.get("r"),
        "lora_alpha": content.get("lora_alpha"),
        "target_modules": _module_names(content.get("target_modules")),
    }
    here = {"lora_rank": lora.rank, "lora_alpha": lora.alpha, "target_modules": sorted(modules)}
    for key, value in here.items():
        if there[key] != value:
            shown = json.dumps(there[key])
            yield (
                key,
                f"{json.dumps(value)}, but lora_adapter_path {folder} has {shown}; set it to that.",
            )


def _module_names(targets: Any) -> list[str] | None:
    """Return the last names of the modules, perhaps written in full by PEFT; None for a pattern."""
    if not isinstance(targets, list):
        return None
    return sorted({str(name).rpartition(".")[2] for name in targets})
