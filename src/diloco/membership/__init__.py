"""The membership of a run: views, votes and view changes, as pure values and functions. Times are arguments."""
