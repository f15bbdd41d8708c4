"""A judge beside the rule: a run whose responses are also scored by an OpenAI-compatible endpoint."""
