"""Runs on several hosts: a coordinator brings their launchers together, attempt by attempt, and keeps strangers out."""
