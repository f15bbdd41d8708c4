"""Programs of other people as agents: each runs with an interpreter of its own (`make setup-agents`)."""
