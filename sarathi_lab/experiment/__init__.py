"""The experiments behind the claims: the same points measured in pairs, or computed."""
