"""A run under fire: workers are killed and stopped, snapshots damaged, the number of workers changed; nothing of it may show."""
