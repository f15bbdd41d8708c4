"""The program from Python: reads runs, starts them, converts models; and the reference of public names."""
