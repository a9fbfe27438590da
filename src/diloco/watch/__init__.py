"""A read-only web page that shows runs and swarms live, from the files that they write and the status of peers."""
