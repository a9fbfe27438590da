"""Small runs with two versions of the package, compared bit by bit."""
