"""Choice and order of a run's prompts from two files."""
