"""Communication between ranks: a world is a value that is passed, and one rank alone is its identity."""
