"""The algorithm: tasks, rewards, advantages, batches, corrections, and the loop on one page."""
