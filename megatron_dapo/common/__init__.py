"""What every part of the program may use, launchers and tools too; imports nothing but the standard library."""
