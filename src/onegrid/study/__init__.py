"""Runs put together from configurations, alone and as the arms of a study."""
