"""`python -m megatron_dapo eval`: how good a model is, by its answers to prompt files. A run's own:
`rollout`."""
