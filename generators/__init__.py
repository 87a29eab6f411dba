"""Generators: vLLM engines that sample responses and take new weights in flight."""
