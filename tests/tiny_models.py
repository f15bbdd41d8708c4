"""Tiny random Hugging Face checkpoints, made on the spot, for every test that needs a model."""

from pathlib import Path
from typing import Literal

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>")
CHARACTERS = "0123456789+-*/=()abcdefghijklmnopqrstuvwxyz .:,"

PAD_ID, EOS_ID, UNK_ID = range(len(SPECIAL_TOKENS))

_FAMILIES = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "glm4": (Glm4Config, Glm4ForCausalLM),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "glm4_moe": (Glm4MoeConfig, Glm4MoeForCausalLM),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
    "gpt_oss": (GptOssConfig, GptOssForCausalLM),
}

GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
DEEPSEEK_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
MIXTURES = ("qwen3_moe", "glm4_moe", "deepseek_v3", "gpt_oss")


def make_tiny(
    path: str | Path,
    family: Literal[
        "qwen2", "qwen3", "llama", "mistral", "glm4", "gemma3", "qwen3_moe", "glm4_moe", "deepseek_v3", "gpt_oss"
    ],
    *,
    tied: bool = False,
    vocab: int = 64,
    layers: int = 4,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    num_experts: int = 8,
    experts_per_token: int = 2,
    norm_topk_prob: bool = True,
    rope: dict | None = None,
    more: dict | None = None,
    seed: int = 0,
) -> Path:
    """Write a random fp32 checkpoint of a family and a tokenizer of single characters to `path`; returns the path.
    rope: the block rope_parameters of config.json. more: other fields of it.

    Every parameter is random, norms and biases too: a parameter that is lost or swapped shows in the log-probs.
    """
    path = Path(path)
    config_class, model_class = _FAMILIES[family]
    mixture = dict(
        num_experts=num_experts,
        num_experts_per_tok=experts_per_token,
        moe_intermediate_size=hidden // 2,
        norm_topk_prob=norm_topk_prob,
    )
    if family == "glm4_moe":
        mixture |= dict(n_routed_experts=mixture.pop("num_experts"), routed_scaling_factor=1.5, attention_bias=True)
    # heads of other widths than hidden_size / heads: 16 + 8 of queries and keys, 12 of values
    latent = dict(q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12)
    if family == "deepseek_v3":
        latent |= dict(n_routed_experts=mixture.pop("num_experts"), n_group=2, topk_group=experts_per_token // 2)
        # what DeepSeek's own code and SGLang read, and transformers does not
        mixture |= latent | dict(first_k_dense_replace=1, moe_layer_freq=1)
        mixture |= dict(topk_method="noaux_tc", scoring_func="sigmoid")
        kv_heads = heads
        rope = rope or DEEPSEEK_ROPE
    if family == "gpt_oss":
        mixture = dict(num_local_experts=num_experts, num_experts_per_tok=experts_per_token)
        mixture |= dict(sliding_window=8, swiglu_limit=1.0)  # some products of each expert lie beyond the limit
        rope = rope or GPT_OSS_ROPE
    if family == "gemma3":  # as all of its checkpoints; two kinds of rotary settings
        tied, rope = True, rope or GEMMA3_ROPE
    # every other layer sees 8 tokens; the products are not divided by the root of head_dim
    gemma = dict(sliding_window=8, sliding_window_pattern=2, query_pre_attn_scalar=hidden)
    fields = dict(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        max_position_embeddings=2048,
        tie_word_embeddings=tied,
        pad_token_id=PAD_ID,
        bos_token_id=None,
        eos_token_id=EOS_ID,
    )
    fields |= mixture if family in MIXTURES else {}
    if family == "deepseek_v3":
        del fields["head_dim"]
    if family == "gpt_oss":  # the width of an expert
        fields["intermediate_size"] = hidden // 2
    fields |= dict(sliding_window=None) if family == "mistral" else {}
    fields |= gemma if family == "gemma3" else {}
    fields |= dict(rope_parameters=rope) if rope else {}
    config = config_class(**(fields | (more or {})))
    model = model_class(config).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        # a router's bias is a buffer there
        biases = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
        for name, parameter in [*model.named_parameters(), *biases]:
            mean = 1.0 if "norm" in name and family != "gemma3" else 0.0  # Gemma's multiply by 1 + weight
            scale = 0.1 if parameter.dim() == 1 else 1.5 / parameter.shape[-1] ** 0.5
            parameter.copy_(mean + scale * torch.randn(parameter.shape, generator=generator))
            if name.endswith(
                ".sinks"
            ):  # of the size of scores; servers hold them in bfloat16 whatever the model's type
                parameter.copy_((10 * parameter).bfloat16())
    model.save_pretrained(path)
    make_tokenizer(min(vocab, len(SPECIAL_TOKENS) + len(CHARACTERS))).save_pretrained(path)
    return path


CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }},{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def make_tiny_classifier(
    path: str | Path, family: Literal["qwen2", "qwen3", "llama"], bias: float | None = None, seed: int = 0
) -> Path:
    """Write a random classifier with one label, over characters, with a chat template of its own; returns the path.

    bias: of its head; with one it is a token classifier, as the critic of a run is when it is converted.
    """
    path = make_tiny(path, family, seed=seed)
    config = AutoConfig.from_pretrained(path, num_labels=1)
    kind = AutoModelForSequenceClassification if bias is None else AutoModelForTokenClassification
    torch.manual_seed(seed)
    model = kind.from_pretrained(path, config=config).float()  # the body of the language model, and a new head
    torch.nn.init.normal_(model.score.weight, std=model.config.hidden_size**-0.5)  # scores of order 1
    if bias is not None:
        torch.nn.init.constant_(model.score.bias, bias)
    (path / "model.safetensors").unlink()
    model.save_pretrained(path)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(path)
    return path


def make_tokenizer(num_tokens: int = len(SPECIAL_TOKENS) + len(CHARACTERS)) -> PreTrainedTokenizerFast:
    """One token per character; what it does not know is <unk>."""
    words = (*SPECIAL_TOKENS, *CHARACTERS)[:num_tokens]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )
