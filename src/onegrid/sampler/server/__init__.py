"""A sampler behind HTTP: weight updates and tokens for a learner elsewhere, and the OpenAI API for everyone."""
