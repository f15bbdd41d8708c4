"""One file per family of models: its config.json, its weights, its class on a server."""
