"""Code as an answer: the tests of a problem, what is compared, and the sandbox in which the program runs."""
