"""Code as an answer: the tests of a problem, the comparison of outputs, and the program's
sandbox."""
