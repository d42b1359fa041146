"""Fuzzing: every reader of files gets tens of thousands of damaged and hostile inputs."""
