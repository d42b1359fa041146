"""Integrations with other packages' trainers; each needs the extra of the same name."""
