"""Communication between workers: a world is a value that is passed, and a single worker is its identity case."""
