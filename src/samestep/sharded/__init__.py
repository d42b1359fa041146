"""Parameters that are sharded over the workers: FSDP2 gathers and frees them, lanes are added."""
