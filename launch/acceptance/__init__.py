"""The acceptance run of a new machine: a ladder of programs, from imports to speed, that stops at
the first red one."""
