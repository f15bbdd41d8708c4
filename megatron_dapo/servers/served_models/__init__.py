"""What SGLang imports of its models: those that a trainer of ours can have (`SGLANG_EXTERNAL_MODEL_PACKAGE`)."""
