"""A reward model beside the rule: a classifier, served by SGLang, scores a run's responses too."""
