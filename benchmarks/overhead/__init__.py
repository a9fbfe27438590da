"""The time that DiLoCo adds to steps between synchronisations, and the memory that it keeps."""
