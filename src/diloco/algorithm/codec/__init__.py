"""Codecs, which encode pseudo-gradients as bytes and decode them."""
