"""Matrix products of chosen tiles."""
