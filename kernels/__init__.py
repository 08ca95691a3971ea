"""Triton kernels: they score every pair of rows, map the score and reduce it, without keeping the pairs.

This folder imports nothing of effops, which imports it lazily: Triton is needed only where a kernel runs.

Start with `pairs`, the simplest family. `launch` has what all families share on the host, `tiles` on the device.
"""
