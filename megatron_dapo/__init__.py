"""DAPO training of language models: Megatron-core actor, SGLang rollout, from laptop to cluster."""
