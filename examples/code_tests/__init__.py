"""A tiny code task: prompts with tests, and the reward `code_tests` on three programs."""
