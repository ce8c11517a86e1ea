"""Autocast: a float32 function in, a mixed-precision one out."""
