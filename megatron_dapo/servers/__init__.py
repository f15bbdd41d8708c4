"""SGLang servers: starting, watching and asking them."""
