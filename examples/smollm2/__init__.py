"""A real language model in the same program: SmolLM2-135M-Instruct on single-digit products."""
