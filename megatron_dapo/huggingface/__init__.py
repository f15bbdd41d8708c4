"""What a Hugging Face config.json says of a model; needs neither torch nor Megatron."""
