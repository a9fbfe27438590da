"""The same small runs with two versions of the package, compared to the bit."""
