"""What can be said of a run before it starts: checks against model and machine, memory, processes, a dry run."""
