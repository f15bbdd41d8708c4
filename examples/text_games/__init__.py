"""Text games as environments: ALFWorld's household tasks, and a small household without
downloads."""
