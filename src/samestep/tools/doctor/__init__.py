"""`samestep doctor`: check this machine, and list problems with their fixes."""
