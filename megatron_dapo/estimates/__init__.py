"""Memory, operations and layers of a run before its start, and data sheets of GPUs."""
