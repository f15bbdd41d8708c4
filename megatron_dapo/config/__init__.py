"""The typed config tree: its schema, the loader, the keys and their arithmetic."""
