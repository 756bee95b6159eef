"""What a run looked like, read from its directory alone: a page for a browser, and the same for a terminal."""
