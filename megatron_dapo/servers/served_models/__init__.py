"""The models imported by SGLang: the trainer's families (`SGLANG_EXTERNAL_MODEL_PACKAGE`)."""
