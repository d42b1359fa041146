"""Communication between workers: a world is a value; a single worker is its identity case."""
