"""Tokens: the protocol of a sampler, the embedded engine, and a fake one."""
