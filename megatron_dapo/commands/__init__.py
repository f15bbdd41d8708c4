"""Commands beside the core: plan a run, report on runs, evaluate a model. The core never imports
them."""
