"""Folders and files of a run: names, locks, files written whole, the key of its servers."""
