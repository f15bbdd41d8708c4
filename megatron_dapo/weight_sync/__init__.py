"""Trainer to servers: the weights of every pipeline stage, over a process group that it shares with
all servers."""
