"""Which sample goes to which lane, and how it is loaded."""
