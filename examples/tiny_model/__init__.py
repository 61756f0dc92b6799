"""A small byte-level decoder: the real model that the examples run, its corpus, and the script that trained it."""
