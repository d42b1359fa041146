"""What takes a run's record elsewhere: each sink in a file of its own."""
