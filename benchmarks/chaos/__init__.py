"""A run under faults: killed and stopped workers, damaged snapshots, changing worker counts."""
