"""A page about one run or several: curves, where the time went, events, and the answers, token by token."""
