"""config.json of models: a small one accepted by every check, for tests to change,
and published sizes."""

MODEL_JSON = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 96,
    "intermediate_size": 256,
    "max_position_embeddings": 4096,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "vocab_size": 1000,
}

_QWEN2_5 = {**MODEL_JSON, "vocab_size": 152064, "max_position_embeddings": 131072, "tie_word_embeddings": False}
QWEN2_5_32B = _QWEN2_5 | {
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "hidden_size": 5120,
    "intermediate_size": 27648,
}
QWEN2_5_7B = _QWEN2_5 | {
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "hidden_size": 3584,
    "intermediate_size": 18944,
}
