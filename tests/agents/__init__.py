"""Programs of other people, as agents and as loggers; `make test-agents` runs these tests, `make
test` does not."""
