"""The queue of groups: draws, filters, admission, replayed experiences, and its saved state."""
