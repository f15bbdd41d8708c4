"""One process, no server."""
