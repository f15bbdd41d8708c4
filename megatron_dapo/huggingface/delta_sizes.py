"""Reads the layers of a gated delta net from a Hugging Face config.json; names everything wrong."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_dapo.huggingface.model_spec import DeltaNet

DELTA_SIZES = (
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
    "linear_conv_kernel_dim",
)  # fmt: skip
"""Fields of config.json, in the order of `DeltaNet`."""

ATTENTION_EVERY = "full_attention_interval"
_KINDS = {True: "full_attention", False: "linear_attention"}  # whether a layer has attention
_CURE = "`python -m checkpoints_tools.text_folder IMAGE_FOLDER TEXT_FOLDER` writes a folder of text with both"
IMAGE_CURE = "; " + _CURE.removesuffix(" with both")
"""End of the message about a model of images and text."""


def read_delta_net(hf: Mapping[str, Any], source: str) -> tuple[DeltaNet | None, list[str]]:
    """Return the sizes, and the faults found. The types are checked already.

    SGLang reads which layers have attention in one field, transformers in another.
    """
    wrong = [f"{source}: `{key}` is missing" for key in DELTA_SIZES if hf.get(key) is None]
    for key, reader in ((ATTENTION_EVERY, "SGLang"), ("layer_types", "transformers")):
        if hf.get(key) is None:
            wrong.append(f"{source}: `{key}` is missing, which {reader} reads; {_CURE}")
    if wrong:
        return None, wrong
    every, num_layers = hf[ATTENTION_EVERY], hf.get("num_hidden_layers") or 0
    if not 2 <= every <= num_layers:
        return None, [f"{source}: `{ATTENTION_EVERY}: {every}` is not between 2 and num_hidden_layers {num_layers}"]
    if hf["layer_types"] != [_KINDS[number % every == 0] for number in range(1, num_layers + 1)]:
        return None, [f"{source}: `layer_types` are not those of {ATTENTION_EVERY} {every}; {_CURE}"]
    state_dtype = str(hf.get("mamba_ssm_dtype") or "float32")
    net = replace(DeltaNet(*(hf[key] for key in DELTA_SIZES)), state_dtype=state_dtype)
    if net.num_value_heads % net.num_key_heads:
        return None, [
            f"{source}: `linear_num_value_heads: {net.num_value_heads}` is not a multiple of linear_num_key_heads "
            f"{net.num_key_heads}"
        ]
    return net, []
