"""One command that measures everything on a GPU, part by part, each in a process of its own; see `parts`."""
