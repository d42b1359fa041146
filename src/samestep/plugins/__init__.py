"""What watches a run and its steps, or changes them, from outside: plugins of both."""
