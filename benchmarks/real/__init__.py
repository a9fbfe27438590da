"""Things that nobody here wrote: see README.md beside this file."""
