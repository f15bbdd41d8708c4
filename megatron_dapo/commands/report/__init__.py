"""A page about one run or several: curves, time spent, events, and the answers, token by token."""
