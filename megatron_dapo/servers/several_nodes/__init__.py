"""Servers over several nodes: a leader, which answers, and followers on the other nodes."""
