"""Copies of snapshots on remote storage, and a function of the user's that is called for every file."""
