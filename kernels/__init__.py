"""Kernels in Triton and C++: they score every pair of rows, map the score and reduce it, without keeping the pairs.

This folder imports nothing of effops, which imports it lazily: Triton is needed only where a kernel runs.

A tile, here, is what one program of a kernel computes at a time, as the field has the word.

Start with `pairs`, the simplest family. `launch` has what all families share on the host, `tiles` on the device. In
`cpp/` start with `mixture.cpp`; `library` loads what is built of it.
"""
