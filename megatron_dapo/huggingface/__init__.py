"""Models by their Hugging Face config.json; needs neither torch nor Megatron."""
