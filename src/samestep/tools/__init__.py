"""Commands that run a job and answer a question about it."""
