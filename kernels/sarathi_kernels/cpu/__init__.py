"""A decoder's iteration on a CPU with AVX512, in C++ compiled on the machine that runs it."""
