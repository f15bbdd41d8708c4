"""Qwen3-Next."""

from dataclasses import replace

from megatron_dapo.huggingface.families.qwen3_5 import MIXTURE_FAMILY, MIXTURE_ROWS, delta, delta_row, values
from megatron_dapo.huggingface.model_spec import ModelSpec
from megatron_dapo.huggingface.weight_rows import changed


def _input_rows(m: ModelSpec) -> tuple[int, int]:
    keys = 2 * delta(m).num_key_heads * delta(m).key_dim
    return keys + 2 * values(m), 2 * delta(m).num_value_heads


# a key head's rows lie side by side, so that a rank has neighbouring ones
_INPUTS = delta_row(
    "linear_in.weight",
    ("in_proj_qkvz.weight", "in_proj_ba.weight"),
    "delta_inputs_by_heads",
    lambda m: [(rows, m.hidden_size) for rows in _input_rows(m)],
    unquantized=("in_proj_ba",),
)
FAMILY = replace(
    MIXTURE_FAMILY,
    architecture="Qwen3NextForCausalLM",
    server_class="megatron_dapo.servers.served_in_type:Qwen3NextForCausalLM",
    tool_parser="qwen25",
    neutral={key: rule for key, rule in MIXTURE_FAMILY.neutral.items() if key != "norm_topk_prob"}
    # SGLang has a head of its own always
    | {"tie_word_embeddings": lambda value: not value},
    rows=changed(MIXTURE_ROWS, _INPUTS),
)
