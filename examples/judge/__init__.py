"""A judge beside the rule: an OpenAI-compatible endpoint scores a run's responses too."""
