"""The outer step in short runs: a delay of a whole round, other average rules, coarse codecs, momentum restarts."""
