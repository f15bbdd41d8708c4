"""The keys of a config, one class per section: the reference manual."""
