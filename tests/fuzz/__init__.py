"""Whatever reads files gets tens of thousands of damaged and hostile ones."""
