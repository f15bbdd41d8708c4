"""The whole program, with a real SGLang server."""
