"""Shared by every part of the program, launchers and tools too; imports only the standard
library."""
