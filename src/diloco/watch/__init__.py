"""A page that shows runs and swarms while they go on. It reads what they write and tell, and changes nothing."""
