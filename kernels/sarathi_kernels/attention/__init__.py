"""Attention over a paged KV cache: plain torch, and Triton for chunks, decodes, both."""
