"""Programs of other people as agents; `make test-agents` runs these tests, `make test` does not."""
