"""Text games as environments: ALFWorld's household tasks, and a small household in its words without downloads."""
