"""The program from Python: reads runs, starts them, converts models."""
