"""The typed config tree: its schema, the loader, checks of keys against each other, and values derived from it."""
